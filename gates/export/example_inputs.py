"""Random inputs of the kind a model takes, for checks and measurements that need some input but no particular one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from gates.errors import GateError, first_line
from gates.export.input_guesses import guesses
from gates.hooks.evaluating import evaluating
from gates.hooks.functional import call_output
from gates.hooks.generators import kept_generators
from gates.hooks.own_method import Use
from gates.hooks.sharded import is_sharded
from gates.sites import find_attention


def example_inputs(
    model: PreTrainedModel, *, batch: int = 2, length: int = 16, padded: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs for one forward pass: text, pictures or sound, or what the model reads together.

    Sizes and token numbers are those of the model's config and of the configs in it. What a config does not tell is guessed,
    and guesses are tried, richest first: the inputs returned did run, and every self-attention module took part, so that a
    comparison on them is one of the whole model. (Cross-attention may be left out, as in a decoder without its encoder.)

    Args:
        model: any Transformers model; an encoder-decoder also gets ``decoder_input_ids`` unless it makes them itself.
        batch: examples.
        length: tokens per example, beside those that stand for a picture or sound; less where the model has fewer positions.
            Pictures and sound have the model's size.
        padded: whether every second example is a quarter shorter, padded on the right.
        seed: the same seed gives the same inputs.

    Raises:
        GateError: if no guess runs, or the model is sharded: then it runs in all processes or in none.

    >>> from transformers import ViTConfig, ViTModel
    >>> model = ViTModel(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4))
    >>> {name: list(tensor.shape) for name, tensor in example_inputs(model).items()}
    {'pixel_values': [2, 3, 8, 8]}
    """
    if is_sharded(model):
        raise GateError(
            f"{type(model).__name__} is sharded, so that one process cannot try inputs on it; gather its weights first, or "
            "give some as check_batch"
        )
    reasons: list[str] = []
    with at_rest(model):
        for found in guesses(model, batch=batch, length=length, padded=padded, seed=seed):
            inputs = of_dtype({name: tensor.to(model.device) for name, tensor in found.items()}, model.dtype)
            try:
                left_out = _left_out(model, inputs)
            except Exception as error:  # models refuse in many ways
                reasons.append(first_line(error).rstrip("."))
                continue
            if not left_out:
                return inputs
            reasons.append(f"attention at {left_out[0]!r} took no part")
    reason = reasons[0] if reasons else f"{model.main_input_name!r} is of no known kind"
    raise GateError(
        f"no example inputs are known that all of {type(model).__name__} runs on ({reason}); "
        "give some as check_batch, such as a processor's output"
    )


def resized(inputs: Mapping[str, Tensor], batch: int, length: int | None = None) -> dict[str, Tensor]:
    """The same inputs with another number of examples and, for tensors ``[batch, length]``, another length.

    Rows and columns are repeated in turn or left out; no attention mask is left without a single visible token.

    Raises:
        GateError: if the first axis is not the examples everywhere, as where patches of all pictures lie in one row.
    """
    rows = {name: len(tensor) for name, tensor in inputs.items()}
    if len(set(rows.values())) > 1:
        raise GateError(f"inputs with first axes of different length ({rows}) cannot be resized; measure them as they are")
    found: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        tensor = tensor[torch.arange(batch, device=tensor.device) % len(tensor)]
        if length is not None and tensor.dim() == 2:
            tensor = tensor[:, torch.arange(length, device=tensor.device) % tensor.shape[1]]
            if name.endswith("attention_mask"):
                tensor = tensor.where(tensor.any(dim=1, keepdim=True), torch.ones_like(tensor))
        found[name] = tensor
    return found


def _left_out(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> list[str]:
    """Names of the self-attention modules that a forward pass on these inputs does not reach.

    Raises:
        Exception: whatever the model raises for inputs that it does not take.
    """
    try:
        sites = [site for site in find_attention(model) if site.kind != "cross"]
    except GateError:  # no heads are left, or none is known
        sites = []
    missing = {site.name for site in sites}
    hooks: list[RemovableHandle | Use] = [handle for site in sites for handle in call_output(site.module)]
    hooks += [
        site.output.register_forward_pre_hook(lambda _module, _inputs, name=site.name: missing.discard(name)) for site in sites
    ]
    try:
        output = model(**inputs)[0]
        while isinstance(output, (tuple, list)) and output:  # feature maps
            output = output[0]
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(output, Tensor):
        raise TypeError(f"its first output is a {type(output).__name__}, no tensor")
    return sorted(missing)


@contextmanager
def at_rest(model: PreTrainedModel) -> Iterator[None]:
    """In evaluation mode and without gradients; modes and random numbers are as before afterwards."""
    with torch.no_grad(), kept_generators(model), evaluating(model):
        yield


def of_dtype(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs, pictures and sound as numbers of the type that a model computes with."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
