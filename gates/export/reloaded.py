"""Whether a model that was saved and loaded again is the one that was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.hooks.evaluating import evaluating
from gates.hooks.generators import kept_generators

TOLERANCE = 1e-4
"""Largest difference of outputs in float32, relative to the largest output; float rounding only."""
ROUNDINGS = 8
"""The same in narrower types, in units of the last place: a pruned model rounds other sums than a gated one."""


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest difference of outputs, relative to the largest, that is rounding in a floating type: 0.008 in float16."""
    return max(TOLERANCE, ROUNDINGS * torch.finfo(dtype).eps)


def check_same_weights(saved: PreTrainedModel, reloaded: PreTrainedModel) -> None:
    """Whether all weights came back to the bit, or as near as the type allows that the reloaded model keeps them in."""
    found = reloaded.state_dict()
    for name, tensor in saved.state_dict().items():
        if name not in found or not torch.equal(tensor.to(found[name]), found[name]):
            raise GateError(f"the reloaded model differs from the saved one in {name!r}; nothing was kept")


def check_same_outputs(model: PreTrainedModel, reloaded: PreTrainedModel, inputs: Mapping[str, Tensor], gates: Tensor) -> None:
    """Whether a reloaded model computes what ``model`` computes under ``gates`` ``[heads]``.

    ``model`` computes with the buffers that are not saved as ``reloaded`` has them: they are made anew when a model is loaded,
    and in float32, whatever type the weights have.

    Raises:
        GateError: if outputs differ by more than the rounding of the model's type.
    """
    head_gates = HeadGates(model)
    with _buffers_of(reloaded, model), head_gates.attached(), head_gates.use(gates.to(model.device)):
        difference = relative_difference(model, reloaded, inputs)
    if not difference <= tolerance_of(model.dtype):
        raise GateError(f"the reloaded model differs from the saved one by {difference:.2g} (relative); nothing was kept")


@torch.no_grad()
def relative_difference(one: PreTrainedModel, other: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """Largest difference between the first outputs of two models in evaluation mode, relative to the largest output.

    Both get the same random numbers, which some models draw in evaluation mode too. Tokens that are padding do not count: what
    they are depends on the attention implementation.
    """
    mask = inputs.get("attention_mask") if "decoder_input_ids" not in inputs else inputs.get("decoder_attention_mask")
    outputs = []
    for model in (one, other):
        placed = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        with evaluating(model), kept_generators(model, seed=0):
            output = model(**placed)[0]
            while isinstance(output, (tuple, list)):  # feature maps
                output = output[-1]
            output = output.float().cpu()
        outputs.append(output[mask.cpu().bool()] if mask is not None and output.shape[:2] == mask.shape else output)
    return float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max().clamp(min=1.0))


@contextmanager
def _buffers_of(reloaded: PreTrainedModel, model: PreTrainedModel) -> Iterator[None]:
    """Lend a model the buffers that are not saved as a reloaded one has them: anew, and in float32 (rotary frequencies)."""
    anew = dict(reloaded.named_non_persistent_buffers())
    lent = [(name, buffer, anew[name]) for name, buffer in model.named_non_persistent_buffers() if name in anew]
    lent = [(name, own, new) for name, own, new in lent if own.shape == new.shape]
    try:
        for name, _, new in lent:
            _set_buffer(model, name, new)
        yield
    finally:
        for name, own, _ in lent:
            _set_buffer(model, name, own)


def _set_buffer(model: PreTrainedModel, name: str, buffer: Tensor) -> None:
    owner, _, child = name.rpartition(".")
    setattr(model.get_submodule(owner), child, buffer)
