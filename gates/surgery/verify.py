"""Surgery that is checked: the model without heads computes what the gated model did, or is left as it was."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from gates.attention.inputs import example_inputs
from gates.attention.modes import evaluating, kept_generators
from gates.attention.own_method import Use, call_output
from gates.attention.sites import AttentionSite
from gates.errors import GateError, first_line
from gates.gating.head_gates import HeadGates

Reading = dict[str, list[Tensor]]
"""What each attention module adds, call by call, and what the model returns, by name."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference of one module by the least precise dtype of its weights, relative: some four units of the last place, of
which rounding was seen to take one in any architecture; in float32 with room for TF32, in float64 for parts in float32."""
ROWS = 256
"""Rows of each tensor that are compared, evenly spread: enough to see a mistake, and little memory for sound and pictures."""
LENGTH = 8
"""Tokens of the texts that are made up."""
SMALLEST = 1e-5
"""Rows shorter than this are taken to be as long."""
SHAPED_BY_HEADS = ("attentions", "past_key_values")
"""Ends of the names of outputs that have an axis of heads."""
GIVE = "give inputs of a forward pass as example={name: tensor, ...}"
INSTEAD = "use form='masked' (zero_heads_), which keeps the dense shape"

_VERIFIED: set[Hashable] = set()
"""Changes of shape that were verified in this process."""


@contextmanager
def verified(
    model: PreTrainedModel, gates: Tensor, kept: Mapping[str, Any], *, example: Mapping[str, Any] | None
) -> Iterator[None]:
    """Compare ``model`` after the block with what it computed before with ``gates``; after an error it is as it was.

    What every attention module adds is compared, and what the model returns, on two short texts, or one picture or sound. Every
    module has the inputs that it had in the gated model, since what those before it add is put back as it was there: rounding
    does not add up from layer to layer, and the tolerance is that of one module. A change that was verified in this process is
    not verified again: the same class, config and dtypes, with as many heads left at each site.

    Args:
        model: model without attached gates, whose heads are removed in the block.
        gates: value of every head's gate that the block is to be equal to, ``[heads]``.
        kept: what stays of each site that changes its shape, by name, as plain data.
        example: keyword arguments of a forward pass of the model; None for random ones, if the model's kind of input is known.

    Raises:
        GateError: if inputs are needed and none are known, the outputs differ, or anything in the block or after it fails.
    """
    key = _key(model, kept)
    is_known = key in _VERIFIED and not _is_changed(model)
    check = _Check(model, gates, kept, example) if kept and not is_known else None
    with undone_on_error(model):
        try:
            yield
            if check is not None:
                check.compare(model)
        except GateError:
            raise
        except Exception as error:  # models fail in many ways where they do not expect fewer heads
            raise GateError(
                f"heads of {type(model).__name__} cannot be removed, so nothing was changed: {first_line(error)}; {INSTEAD}"
            ) from error
    if check is not None:
        _VERIFIED.add(key)


class _Check:
    """The gated model's outputs, for comparison with the model without heads."""

    def __init__(
        self, model: PreTrainedModel, gates: Tensor, kept: Mapping[str, Any], example: Mapping[str, Any] | None
    ) -> None:
        gated = HeadGates(model)
        self.sites = gated.sites
        self.tolerances = {site.name: _tolerance(site.module) for site in self.sites}
        self.inputs = _inputs(model, example)
        with gated.attached(), gated.use(gates.to(gated.mask)):
            try:
                self.expected = self._read(model, {})
            except GateError:
                raise
            except Exception as error:  # models refuse inputs in many ways
                raise GateError(
                    f"removing heads is checked on example inputs, and {type(model).__name__} fails on "
                    f"{', '.join(map(repr, self.inputs))} ({first_line(error)}); {GIVE}"
                ) from error
        _check_reached(self.sites, kept, self.expected)

    def compare(self, model: PreTrainedModel) -> None:
        """Raises :class:`GateError` if the model without heads computes something else than the gated model."""
        found = self._read(model, self.expected)
        for name, tensors in self.expected.items():
            difference = _relative_difference([_rows(tensor) for tensor in tensors], found.get(name, []))
            tolerance = self.tolerances[name] if name in self.tolerances else _tolerance(model)
            if not difference <= tolerance:
                where = name if name.startswith("output ") else f"what {name!r} adds"
                raise GateError(
                    f"heads of {type(model).__name__} cannot be removed, so nothing was changed: without them {where} differs "
                    f"from that of the gated model by {difference:.2g} (relative; up to {tolerance:.0e} is rounding); {INSTEAD}"
                )

    def _read(self, model: PreTrainedModel, instead: Reading) -> Reading:
        return _read(model, self.sites, self.inputs, instead)


@contextmanager
def undone_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Give a model back its modules, parameters, buffers, hooks and config if the block raises an error.

    The block may exchange tensors, but not write into those that it finds.
    """
    tables = [vars(model.config)]
    for module in model.modules():
        tables += [vars(module), *(value for value in vars(module).values() if isinstance(value, dict))]
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    except BaseException:
        for table, content in before:
            table.clear()
            table.update(content)
        raise


# -- what a model computes -------------------------------------------------------------------------------------


@torch.no_grad()
def _read(model: PreTrainedModel, sites: Sequence[AttentionSite], inputs: Mapping[str, Any], instead: Reading) -> Reading:
    """Run one forward pass in evaluation mode, always with the same random numbers. The model goes on with the outputs of
    attention modules in ``instead``, if there are any, in place of its own."""
    reading: Reading = {}
    handles: list[RemovableHandle | Use] = [handle for site in sites for handle in call_output(model.get_submodule(site.name))]
    handles += [
        model.get_submodule(f"{site.name}.{site.layout.output}".lstrip(".")).register_forward_hook(
            partial(_record, reading, instead, site.name)
        )
        for site in sites
    ]
    try:
        with evaluating(model), kept_generators(model, seed=0), torch.autocast(model.device.type, enabled=False):
            for number, tensor in enumerate(_tensors(model(**inputs))):
                reading[f"output {number}"] = [_rows(tensor)]
    finally:
        for handle in handles:
            handle.remove()
    return reading


def _record(reading: Reading, instead: Reading, name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """Put an output into the reading, whole if the model goes on with it; what it goes on with otherwise."""
    calls = reading.setdefault(name, [])
    others = instead.get(name, [])[len(calls) :]
    calls.append(_rows(output) if instead else output.clone())
    return others[0].clone() if others and others[0].shape == output.shape else None


def _rows(tensor: Tensor) -> Tensor:
    """Rows of features of a tensor, evenly spread, in a copy."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    return rows[:: max(1, len(rows) // ROWS)].clone()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors that a model returns, without those that have an axis of heads."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if not str(name).endswith(SHAPED_BY_HEADS):
                yield from _tensors(value)
    elif isinstance(output, tuple) and output:
        yield from _tensors(output[0])


def _inputs(model: PreTrainedModel, example: Mapping[str, Any] | None) -> dict[str, Any]:
    """The example, or random inputs, on the model's device."""
    if example is not None:
        return {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in example.items()}
    batch = 2 if model.main_input_name == "input_ids" else 1  # pictures and sound have many positions as it is
    try:
        return dict(example_inputs(model, batch=batch, length=LENGTH))
    except Exception as error:  # configs lack what is looked for in many ways
        raise GateError(
            "removing heads is checked on example inputs, and none are known for "
            f"{type(model).__name__} ({first_line(error).partition(';')[0]}); {GIVE}"
        ) from error


# -- the comparison --------------------------------------------------------------------------------------------


def _check_reached(sites: Sequence[AttentionSite], kept: Mapping[str, Any], reading: Reading) -> None:
    """Whether attention of every kind that is cut ran at least once; a single idle layer is no matter (LLaVA's last)."""
    cut = [site for site in sites if site.name in kept]
    reached = {(type(site.core), site.layout) for site in cut if site.name in reading}
    for site in cut:
        if (type(site.core), site.layout) not in reached:
            raise GateError(
                f"removing heads is checked on example inputs, and on these {type(site.core).__name__} at {site.name!r} does "
                f"not run; {GIVE}, or keep all its heads"
            )


def _tolerance(module: nn.Module) -> float:
    """By the least precise of the types of its weights."""
    return max((TOLERANCES.get(parameter.dtype, 0.0) for parameter in module.parameters()), default=0.0)


def _relative_difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest distance between rows ``[rows, features]``, relative to the longest of the first rows; NaN for unequal
    shapes."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return torch.nan
    one, other = torch.cat(ones).double(), torch.cat(others).double()
    differences = torch.where(one == other, 0.0, one - other)  # infinities that are equal differ by nothing
    lengths = torch.where(one.isfinite(), one, 0.0).norm(dim=1)
    return float(differences.norm(dim=1).amax() / lengths.amax().clamp(min=SMALLEST)) if one.numel() else 0.0


def _is_changed(model: PreTrainedModel) -> bool:
    """Whether a model runs code that its classes do not tell of: hooks, or a forward of its own."""
    return any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules())


def _key(model: PreTrainedModel, kept: Mapping[str, Any]) -> Hashable:
    """What decides whether removing heads is exact: the code that runs, and the shapes before and after."""
    config = model.config.to_dict() | {"_name_or_path": "", "_attn_implementation": model.config._attn_implementation}
    shapes = tuple((parameter.shape, parameter.dtype) for parameter in model.parameters())
    return type(model), repr(config), tuple(map(type, model.modules())), shapes, repr(kept)


# Whether a model that was saved and loaded again is the one that was saved.

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
