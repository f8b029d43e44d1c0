"""Attention of unknown structure, found by running it: where its heads lie side by side, before which projection.

The table of layouts knows projections by name. Where no row fits, one head's attention probabilities are set to zero, and it is
seen which features of which linear layer's input become zero: those are the head's. If every head has a block of its own, of
one size and in order, the layer is an output projection that gates can be put before. Nothing is known of the rest of the
module, so heads found this way can be gated and scored, not removed.
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

PROBED = "its structure is known from a probe alone, which says nothing of its queries, keys and values"


def probe_attention(model: PreTrainedModel, inputs: Mapping[str, Any], *, only: str = "") -> tuple[AttentionSite, ...]:
    """The attention sites of a model, those of unknown structure found by running it.

    Args:
        model: model of any class.
        inputs: keyword arguments of a forward pass that reaches all its attention.
        only: path of a submodule whose attention alone is meant; empty for the whole model.

    Returns:
        Sites in module order, to be given to :class:`gates.gating.head_gates.HeadGates`.

    Raises:
        GateError: for attention whose heads do not show.
    """
    found = {site.name: site for site in matched_sites(model, only=only)}
    unknown = unknown_attention(model, found.values(), only=only)
    innermost = {
        name: module
        for name, module in unknown.items()
        if not any(is_attention(part) for part in module.modules() if part is not module)
    }
    seen = _Seen()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.no_grad(), evaluating(model), torch.random.fork_rng(devices), seen:
        for name, module in innermost.items():
            site = _probed(model, inputs, name, module, seen)
            found[site.name] = site
    order = {name: position for position, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(found.values(), key=lambda site: order.get(site.name, len(order))))


SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax, functional.scaled_dot_product_attention)
"""PyTorch's functions whose outputs have an axis of heads: attention probabilities, or what attention gives."""


class _Seen(TorchFunctionMode):
    """The softmax calls of this thread: which module was running, and how many heads its matrices have."""

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
        """A matrix ``[batch, heads, query, key or feature]``, that of a closed head zero."""
        if matrix.dim() != 4 or not self.running:
            return matrix
        module = self.running[-1]
        self.heads[id(module)] = matrix.shape[1]
        if self.closed is None or self.closed[0] is not module or self.closed[1] >= matrix.shape[1]:
            return matrix
        matrix = matrix.clone()
        matrix[:, self.closed[1]] = 0.0
        return matrix


def _probed(model: PreTrainedModel, inputs: Mapping[str, Any], name: str, core: nn.Module, seen: _Seen) -> AttentionSite:
    """The site around a module that computes attention: in it, or in the module that has it and its output projection."""
    dense = _run(model, inputs, core, seen)
    heads = seen.heads.get(id(core), 0)
    described = f"{type(core).__name__} at {name!r}"
    if heads < 1:
        raise GateError(
            f"no attention of several heads was seen in {described}, so its heads cannot be gated; give inputs that reach it, "
            "or name a part of the model that does without it (only='language_model')"
        )
    closed: list[dict[str, Tensor]] = []
    for head in range(heads):
        seen.closed = (core, head)
        closed.append(_run(model, inputs, core, seen))
    seen.closed = None
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
        f"none of the linear layers in {described} has its {heads} heads side by side, so they cannot be gated; describe it in "
        "gates.attention.layouts.LAYOUTS, or name a part of the model that does without it (only='language_model')"
    )


def _has_heads(dense: Tensor, closed: Sequence[Tensor | None]) -> bool:
    """Whether each head has a block of features of its own, which is zero when it is closed, while all others stay. Features
    are ``[..., heads * head_dim]``: with all heads, and with one closed, head by head (None where the layer was not called)."""
    if any(one is None or one.shape != dense.shape for one in closed):
        return False
    without = [one for one in closed if one is not None]
    changed = torch.stack([(one != dense).flatten(0, -2).any(0) for one in without]).cpu()
    zero = torch.stack([(one == 0).flatten(0, -2).all(0) for one in without]).cpu()
    blocks = torch.eye(len(closed), dtype=torch.bool).repeat_interleave(dense.shape[-1] // len(closed), dim=1)
    return bool((changed == blocks).all()) and bool(zero[blocks].all())


def _run(model: PreTrainedModel, inputs: Mapping[str, Any], core: nn.Module, seen: _Seen) -> dict[str, Tensor]:
    """One forward pass; what each linear layer was given in its first call, by its path in the model."""
    given: dict[str, Tensor] = {}
    with kept_generators(model, seed=0), ExitStack() as stack:
        stack.callback(core.register_forward_pre_hook(lambda own, _: seen.running.append(own)).remove)
        stack.callback(core.register_forward_hook(lambda *_: _left(seen), always_call=True).remove)
        for path, part in model.named_modules():
            if is_linear(part):
                stack.callback(part.register_forward_pre_hook(partial(_keep, given, path)).remove)
        model(**inputs)
    return given


def _left(seen: _Seen) -> None:
    seen.running.pop()


def _keep(given: dict[str, Tensor], path: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
    given.setdefault(path, args[0].clone())
