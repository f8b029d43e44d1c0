"""Find the heads of attention with unknown structure by running it.

The table of layouts knows projections by name. Where no row fits, the probe sets the attention probabilities of one head to
zero. The features of a linear layer's input that become zero belong to this head. If every head has its own block of features,
of one size and in order, the layer is an output projection and can be gated. The rest of the module stays unknown, so such
heads can be gated and scored but not removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from gates.attention.layouts import Layout
from gates.attention.modes import evaluating, kept_generators
from gates.attention.sites import AttentionSite, is_attention, is_linear, kind_of, layer_of, matched_sites, unknown_attention
from gates.errors import GateError

PROBED = "its structure was found by a probe, which does not find queries, keys and values"


def probe_attention(model: PreTrainedModel, inputs: Mapping[str, Any], *, only: str = "") -> tuple[AttentionSite, ...]:
    """Return the attention sites of a model; find those of unknown structure by running it.

    Args:
        inputs: The keyword arguments of a forward pass that reaches all its attention.
        only: The path of a submodule to search. Empty for the whole model.

    Returns:
        Sites in module order, for :class:`gates.gating.head_gates.HeadGates`.
    """
    found = {site.name: site for site in matched_sites(model, only=only)}
    unknown = unknown_attention(model, found.values(), only=only)
    innermost = {
        name: module
        for name, module in unknown.items()
        if not any(is_attention(part) for part in module.modules() if part is not module)
    }
    mode = _SoftmaxMode()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices), mode:
        for name, module in innermost.items():
            site = _probed(model, inputs, name, module, mode)
            found[site.name] = site
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(found.values(), key=lambda site: order.get(site.name, len(order))))


SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax, functional.scaled_dot_product_attention)
"""PyTorch's functions whose outputs, attention probabilities or attention outputs, have an axis of heads."""


class _SoftmaxMode(TorchFunctionMode):
    """Record the number of heads in the softmax calls of each module, and set one head to zero on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[nn.Module] = []
        self.heads: dict[int, int] = {}
        self.closed: tuple[nn.Module, int] | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        return self._without_closed(output) if function in SOFTMAX else output

    def _without_closed(self, matrix: Tensor) -> Tensor:
        """Set the closed head to zero in a matrix ``[batch, heads, query, key or feature]``."""
        if matrix.dim() != 4 or not self.running:
            return matrix
        module = self.running[-1]
        self.heads[id(module)] = matrix.shape[1]
        if self.closed is None or self.closed[0] is not module or self.closed[1] >= matrix.shape[1]:
            return matrix
        matrix = matrix.clone()
        matrix[:, self.closed[1]] = 0.0
        return matrix


def _probed(model: PreTrainedModel, inputs: Mapping[str, Any], name: str, core: nn.Module, mode: _SoftmaxMode) -> AttentionSite:
    """Return the site of a module that computes attention. Its output projection is in the module or in its parent."""
    dense = _run(model, inputs, core, mode)
    heads = mode.heads.get(id(core), 0)
    described = f"{type(core).__name__} at {name!r}"
    if heads < 1:
        raise GateError(
            f"{described} computed no attention with several heads; give inputs that reach it, or name a part of the model "
            "without it (only='language_model')"
        )
    closed: list[dict[str, Tensor]] = []
    for head in range(heads):
        mode.closed = (core, head)
        closed.append(_run(model, inputs, core, mode))
    mode.closed = None
    parent = name.rpartition(".")[0]
    for place in (name, parent) if parent and is_attention(model.get_submodule(parent)) else (name,):
        for path, features in dense.items():
            if not path.startswith(f"{place}.") or features.shape[-1] % heads:
                continue
            if _has_heads(features, [one.get(path) for one in closed]):
                module = model.get_submodule(place)
                return AttentionSite(
                    name=place,
                    kind=kind_of(model, name, core),
                    layer=layer_of(name),
                    heads=heads,
                    kv_heads=heads,
                    head_dim=features.shape[-1] // heads,
                    layout=Layout("", "", "", path.removeprefix(f"{place}."), gate_only=PROBED),
                    module=module,
                )
    raise GateError(
        f"no linear layer in {described} has its {heads} heads side by side; describe it in gates.attention.layouts.LAYOUTS, "
        "or name a part of the model without it (only='language_model')"
    )


def _has_heads(dense: Tensor, closed: Sequence[Tensor | None]) -> bool:
    """Return whether closing a head sets its own block of features to zero and changes no other feature.

    Args:
        dense: The features with all heads open, ``[..., heads * head_dim]``.
        closed: The features with one head closed, for each head; None where the layer was not called.
    """
    if any(one is None or one.shape != dense.shape for one in closed):
        return False
    without = [one for one in closed if one is not None]
    changed = torch.stack([(one != dense).flatten(0, -2).any(0) for one in without]).cpu()
    zero = torch.stack([(one == 0).flatten(0, -2).all(0) for one in without]).cpu()
    blocks = torch.eye(len(closed), dtype=torch.bool).repeat_interleave(dense.shape[-1] // len(closed), dim=1)
    return bool((changed == blocks).all()) and bool(zero[blocks].all())


def _run(model: PreTrainedModel, inputs: Mapping[str, Any], core: nn.Module, mode: _SoftmaxMode) -> dict[str, Tensor]:
    """Run one forward pass and return the input of each linear layer's first call, by its path in the model."""
    layer_inputs: dict[str, Tensor] = {}

    def keep_input(path: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        layer_inputs.setdefault(path, args[0].clone())

    def leave(*_: Any) -> None:
        mode.running.pop()

    with kept_generators(model, seed=0), ExitStack() as stack:
        stack.callback(core.register_forward_pre_hook(lambda own, _: mode.running.append(own)).remove)
        stack.callback(core.register_forward_hook(leave, always_call=True).remove)
        for path, part in model.named_modules():
            if is_linear(part):
                stack.callback(part.register_forward_pre_hook(partial(keep_input, path)).remove)
        model(**inputs)
    return layer_inputs
