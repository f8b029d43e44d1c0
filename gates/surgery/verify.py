"""Verify surgery: the model without heads computes the same as the gated model, or is restored."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.attention.inputs import example_inputs
from gates.attention.modes import evaluating, kept_generators
from gates.attention.own_method import calling_outputs
from gates.attention.sites import AttentionSite
from gates.errors import GateError, first_line
from gates.gating.head_gates import HeadGates

Outputs = dict[str, list[Tensor]]
"""By name, the outputs of each attention module in the order of its calls, and the outputs of the model."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The largest relative difference of one module, by the least precise dtype of its weights. It is about four units in the last
place. Rounding took at most one in every architecture. float32 allows for TF32, and float64 for parts in float32."""
GIVE = "give inputs of a forward pass as example={name: tensor, ...}"
INSTEAD = "use form='masked' (zero_heads_), which keeps the dense shape"

_VERIFIED: set[Hashable] = set()
"""Changes of shape that were verified in this process."""


@contextmanager
def verified(
    model: PreTrainedModel, gates: Tensor, kept: Mapping[str, Any], *, example: Mapping[str, Any] | None
) -> Iterator[None]:
    """Compare the outputs of ``model`` after the block with those of the gated model, and restore the model on an error.

    The outputs of every attention module and of the model are compared on two short texts, one picture or one sound. Every
    module gets the inputs that it had in the gated model. So rounding does not add up from layer to layer, and the tolerance
    is that of one module. A verified change is not verified again in this process: the same class, config, dtypes and number
    of heads at each site.

    Args:
        gates: The gate of every head in the gated model, ``[heads]``.
        kept: The new shape of each site that changes, by name.
        example: The keyword arguments of a forward pass. None for random inputs.
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
        except Exception as error:  # code that does not expect fewer heads fails in many ways
            raise GateError(
                f"heads of {type(model).__name__} cannot be removed, so nothing was changed: {first_line(error)}; {INSTEAD}"
            ) from error
    if check is not None:
        _VERIFIED.add(key)


class _Check:
    """Hold the gated model's outputs, and compare those of the model without heads."""

    def __init__(
        self, model: PreTrainedModel, gates: Tensor, kept: Mapping[str, Any], example: Mapping[str, Any] | None
    ) -> None:
        gated = HeadGates(model)
        self.sites = gated.sites
        self.tolerances = {site.name: _tolerance(site.module) for site in self.sites}
        self.inputs = _inputs(model, example)
        with gated.attached(), gated.use(gates.to(gated.mask)):
            try:
                self.expected = _outputs(model, self.sites, self.inputs, {})
            except GateError:
                raise
            except Exception as error:  # models refuse inputs in many ways
                raise GateError(
                    f"removing heads is checked on example inputs, and {type(model).__name__} fails on "
                    f"{', '.join(map(repr, self.inputs))} ({first_line(error)}); {GIVE}"
                ) from error
        _check_reached(self.sites, kept, self.expected)

    def compare(self, model: PreTrainedModel) -> None:
        """Raise :class:`GateError` if the outputs of the model without heads differ from those of the gated model."""
        found = _outputs(model, self.sites, self.inputs, self.expected)
        for name, tensors in self.expected.items():
            difference = _relative_difference([_rows(tensor) for tensor in tensors], found.get(name, []))
            tolerance = self.tolerances[name] if name in self.tolerances else _tolerance(model)
            if not difference <= tolerance:
                where = name if name.startswith("output ") else f"the output of {name!r}"
                raise GateError(
                    f"heads of {type(model).__name__} cannot be removed, so nothing was changed: {where} differs from the "
                    f"gated model by {difference:.2g} (relative; at most {tolerance:.0e} expected); {INSTEAD}"
                )


@contextmanager
def undone_on_error(model: PreTrainedModel) -> Iterator[None]:
    """Restore a model's modules, parameters, buffers, hooks and config if the block raises an error.

    The block may replace tensors, but must not write into existing ones.
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


@torch.no_grad()
def _outputs(model: PreTrainedModel, sites: Sequence[AttentionSite], inputs: Mapping[str, Any], instead: Outputs) -> Outputs:
    """Run one forward pass in evaluation mode with fixed random numbers. Outputs of attention modules in ``instead`` replace
    the model's own."""
    found: Outputs = {}
    with (
        evaluating(model),
        calling_outputs(model),
        kept_generators(model, seed=0),
        torch.autocast(model.device.type, enabled=False),
        ExitStack() as stack,
    ):
        for site in sites:
            output = model.get_submodule(f"{site.name}.{site.layout.output}".lstrip("."))
            stack.callback(output.register_forward_hook(partial(_record, found, instead, site.name)).remove)
        for number, tensor in enumerate(_tensors(model(**inputs))):
            found[f"output {number}"] = [_rows(tensor)]
    return found


def _record(found: Outputs, instead: Outputs, name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """Record an output, and return its replacement if there is one. Without replacements the whole output is kept."""
    calls = found.setdefault(name, [])
    others = instead.get(name, [])[len(calls) :]
    calls.append(_rows(output) if instead else output.clone())
    return others[0].clone() if others and others[0].shape == output.shape else None


def _rows(tensor: Tensor) -> Tensor:
    """Copy about 256 evenly spread rows of features: enough to find a mistake, with little memory for sound and pictures."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    return rows[:: max(1, len(rows) // 256)].clone()


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors that a model returns, except those with an axis of heads."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if not str(name).endswith(("attentions", "past_key_values")):
                yield from _tensors(value)
    elif isinstance(output, tuple) and output:
        yield from _tensors(output[0])


def _inputs(model: PreTrainedModel, example: Mapping[str, Any] | None) -> dict[str, Any]:
    if example is not None:
        return {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in example.items()}
    batch = 2 if model.main_input_name == "input_ids" else 1  # one picture or sound has many positions
    try:
        return dict(example_inputs(model, batch=batch, length=8))
    except Exception as error:  # configs lack entries in many ways
        raise GateError(
            "removing heads is checked on example inputs, and none are known for "
            f"{type(model).__name__} ({first_line(error).partition(';')[0]}); {GIVE}"
        ) from error


def _check_reached(sites: Sequence[AttentionSite], kept: Mapping[str, Any], outputs: Outputs) -> None:
    """Raise an error unless every kind of attention to cut ran at least once. A single layer may be idle, such as LLaVA's
    last."""
    cut = [site for site in sites if site.name in kept]
    reached = {(type(site.core), site.layout) for site in cut if site.name in outputs}
    for site in cut:
        if (type(site.core), site.layout) not in reached:
            raise GateError(
                f"removing heads is checked on example inputs, but {type(site.core).__name__} at {site.name!r} does not run on "
                f"them; {GIVE}, or keep all its heads"
            )


def _tolerance(module: nn.Module) -> float:
    return max((TOLERANCES.get(parameter.dtype, 0.0) for parameter in module.parameters()), default=0.0)


def _relative_difference(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest distance between rows ``[rows, features]``, relative to the longest row of ``ones``, which counts as
    at least 1e-5 long; NaN for unequal shapes."""
    if [one.shape for one in ones] != [other.shape for other in others]:
        return torch.nan
    one, other = torch.cat(ones).double(), torch.cat(others).double()
    differences = torch.where(one == other, 0.0, one - other)  # equal infinities have no difference
    lengths = torch.where(one.isfinite(), one, 0.0).norm(dim=1)
    return float(differences.norm(dim=1).amax() / lengths.amax().clamp(min=1e-5)) if one.numel() else 0.0


def _is_changed(model: PreTrainedModel) -> bool:
    """Return whether a model runs code that is not in its classes: hooks, or a replaced forward."""
    return any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in model.modules())


def _key(model: PreTrainedModel, kept: Mapping[str, Any]) -> Hashable:
    """Return everything that decides whether removing heads is exact: the code, and the shapes before and after."""
    config = model.config.to_dict() | {"_name_or_path": "", "_attn_implementation": model.config._attn_implementation}
    shapes = tuple((parameter.shape, parameter.dtype) for parameter in model.parameters())
    return type(model), repr(config), tuple(map(type, model.modules())), shapes, repr(kept)


TOLERANCE = 1e-4
"""The largest difference of outputs in float32, relative to the largest output."""


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest difference by rounding between outputs of two models, relative to the largest output.

    It is :data:`TOLERANCE`, or 8 units in the last place of narrower types (0.008 in float16).
    """
    return max(TOLERANCE, 8 * torch.finfo(dtype).eps)


def check_same_weights(saved: PreTrainedModel, reloaded: PreTrainedModel) -> None:
    """Raise an error unless all weights are equal, after a cast to the dtype of the reloaded model."""
    found = reloaded.state_dict()
    for name, tensor in saved.state_dict().items():
        if name not in found or not torch.equal(tensor.to(found[name]), found[name]):
            raise GateError(f"the reloaded model differs from the saved one in {name!r}; nothing was kept")


def check_same_outputs(model: PreTrainedModel, reloaded: PreTrainedModel, inputs: Mapping[str, Tensor], gates: Tensor) -> None:
    """Raise an error unless a reloaded model has the outputs of ``model`` with ``gates`` ``[heads]``.

    ``model`` uses the non-persistent buffers of ``reloaded``, because loading always makes them in float32.
    """
    head_gates = HeadGates(model)
    with _buffers_of(reloaded, model), head_gates.attached(), head_gates.use(gates.to(model.device)):
        difference = relative_difference(model, reloaded, inputs)
    if not difference <= tolerance_of(model.dtype):
        raise GateError(f"the reloaded model differs from the saved one by {difference:.2g} (relative); nothing was kept")


@torch.no_grad()
def relative_difference(one: PreTrainedModel, other: PreTrainedModel, inputs: Mapping[str, Tensor]) -> float:
    """Return the largest difference between the first outputs of two models in evaluation mode, relative to the largest output.

    Both get the same random numbers, which some models draw in evaluation mode. Padding tokens do not count, because their
    outputs depend on the attention implementation.
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
    """Give a model the non-persistent buffers of a reloaded one, such as rotary frequencies in float32."""
    others = dict(reloaded.named_non_persistent_buffers())
    lent = [(name, buffer, others[name]) for name, buffer in model.named_non_persistent_buffers() if name in others]
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
