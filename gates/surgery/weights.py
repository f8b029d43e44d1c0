"""Which weights heads can be taken out of: plain numbers in memory, that nothing else shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gates.errors import GateError, first_line
from gates.sites import AttentionSite, Projection, weight_by_output

PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Numbers that mean what they say, and can be multiplied."""
FIRST = "dequantise the model first, or close heads before it is quantised"


def check_in_memory(model: nn.Module) -> None:
    """Whether all weights of a model are there.

    Raises:
        GateError: for weights on the meta device: not loaded yet, or offloaded to the disk or the CPU by Accelerate.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise GateError(
                f"{name!r} of {type(model).__name__} is on the meta device, as weights are that are not loaded or are "
                "offloaded; load the model whole (without a device_map that offloads) before its heads are changed"
            )


def is_plain(projection: Projection) -> bool:
    """Whether a projection's weight is an ordinary parameter of floating-point numbers: not quantised, computed from others,
    or spread over devices."""
    weight = projection._parameters.get("weight")
    return type(weight) is nn.Parameter and weight.dtype in PLAIN


def check_plain(sites: Sequence[AttentionSite]) -> None:
    """Whether rows and columns can be taken out of all projections of these sites.

    Raises:
        GateError: for quantised weights, and for other kinds of tensors.
    """
    for site in sites:
        for path in site.layout.paths:
            if not is_plain(site.projection(path)):
                raise GateError(
                    f"{path!r} of {site.name!r} holds {_kind(site.projection(path))}; heads can be removed from plain "
                    "floating-point weights alone: dequantise the model first, or remove heads before it is quantised"
                )


def fold_(sites: Sequence[AttentionSite], gates: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
    """Multiply each head's columns of the output projections by its gate; a weight that several sites share, once.

    Args:
        sites: attention modules.
        gates: gates of each site's heads, ``[heads]``.
        modules: all modules of the model, among which weights may be shared.

    Raises:
        GateError: if a weight is shared and its users do not have the same gates, or is not an ordinary one and the gates are
            others than 0 and 1 or its zeros do not mean zero; nothing is changed then.
    """
    _check_shared(sites, gates, modules)
    folds = {id(site.output.weight): (site, gate) for site, gate in zip(sites, gates, strict=True)}
    changes = [(site, gate) for site, gate in folds.values() if not bool((gate == 1).all())]
    special = [(site, gate) for site, gate in changes if not is_plain(site.output)]
    for site, gate in special:
        if not bool(((gate == 0) | (gate == 1)).all()):
            raise GateError(f"{_describe(site)}, so gates other than 0 and 1 cannot be folded into it; {FIRST}")
    before = [site.output.weight.detach().clone() for site, _ in special]
    try:
        for site, gate in special:
            _zero_(site, gate)
    except GateError:
        for (site, _), weight in zip(special, before, strict=True):
            site.output.weight.detach().copy_(weight)
        raise
    for site, gate in changes:
        if is_plain(site.output):
            columns = weight_by_output(site.output)
            columns.mul_(_features(gate, site).to(columns))


def _check_shared(sites: Sequence[AttentionSite], gates: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
    """Whether all users of a shared output projection have the same gates."""
    first: dict[int, tuple[AttentionSite, Tensor]] = {}
    for site, gate in zip(sites, gates, strict=True):
        other, others = first.setdefault(id(site.output.weight), (site, gate))
        if not torch.equal(gate, others):
            raise GateError(
                f"{site.name!r} and {other.name!r} share the weights of their output projections but not their gates, which so "
                "cannot be folded into these weights; give both the same gates, or remove the heads (remove_heads_)"
            )
    projections = {id(site.output) for site in sites}
    for module in modules:
        for name, parameter in module._parameters.items():
            if id(module) in projections or id(parameter) not in first:
                continue
            site, gate = first[id(parameter)]
            if not bool((gate == 1).all()):
                raise GateError(
                    f"the output projection of {site.name!r} shares its weights with {type(module).__name__}.{name}, which "
                    "is no attention's output, so gates cannot be folded into them; remove the heads (remove_heads_)"
                )


def _zero_(site: AttentionSite, gate: Tensor) -> None:
    """Close heads in a weight that is not an ordinary one, if zeros mean zero there, as the projection itself computes."""
    closed = _features(1 - gate, site).to(site.output.weight.device, torch.get_default_dtype())
    columns = weight_by_output(site.output).detach()
    try:
        columns.mul_((1 - closed).to(columns))
        exact = torch.equal(site.output(closed[None]), site.output(0 * closed[None]))
    except Exception as error:  # quantised tensors lack operations in many ways
        raise GateError(f"{_describe(site)}, in which heads cannot be closed ({first_line(error)}); {FIRST}") from error
    if not exact:
        raise GateError(f"{_describe(site)}, whose zeros do not close a head; {FIRST}")


def _features(gate: Tensor, site: AttentionSite) -> Tensor:
    """A site's gates ``[heads]`` for each feature of its heads, ``[heads * head_dim]``."""
    return gate.repeat_interleave(site.head_dim)


def _describe(site: AttentionSite) -> str:
    return f"the output projection of {site.name!r} holds {_kind(site.output)}"


def _kind(projection: Projection) -> str:
    """The kind of a weight, such as ``Parameter of int8``."""
    return f"{type(projection.weight).__name__} of {str(projection.weight.dtype).removeprefix('torch.')}"
