"""Remove attention heads for good: fewer rows in query, key and value, fewer columns in the output projection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.pruned import reshape_
from gates.sites import AttentionSite, find_attention, weight_by_output

Model = TypeVar("Model", bound=PreTrainedModel)

COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
WIDTH_NAMES = ("all_head_size", "split_size")


@dataclass(frozen=True)
class _Cut:
    """What stays of one site: query heads, the key/value head of each remaining group, queries per group."""

    site: AttentionSite
    queries: list[int]
    keys: list[int]
    per_group: int


@torch.no_grad()
def remove_heads_(model: Model, mask: Tensor, *, values: Tensor | None = None) -> Model:
    """Physically remove the heads where ``mask`` is 0, in place.

    The result computes what the gated model computes in evaluation mode with gates ``mask * values``. Under
    grouped-query attention a key/value head stays while one of its query heads does; where the groups keep
    different numbers of query heads, key/value heads are repeated so that all groups are again of one size (their
    greatest common divisor), which is exact but can store more keys than the dense model did: see the shapes in
    ``model.config.pruned_attention``. A site that keeps no head keeps its output projection's bias.

    Args:
        model: a Transformers model without attached gates.
        mask: 0/1 per head, ``[heads]`` in site order.
        values: gate values to fold into the output projection, ``[heads]``; ones by default.

    Returns:
        The same model. ``model.config.pruned_attention`` says what was done.

    Raises:
        GateError: if gates are attached or the mask is of another model.
    """
    sites = find_attention(model)
    check_removable(sites)
    mask = _checked(mask, sites)
    sizes = [site.heads for site in sites]
    values = torch.ones_like(mask) if values is None else values.detach().cpu()
    cuts = [_cut(site, keep) for site, keep in zip(sites, mask.split(sizes), strict=True)]
    weights = [_sliced(cut, gate) for cut, gate in zip(cuts, values.split(sizes), strict=True)]

    base_name = _base_name(model)
    shapes = {cut.site.name.removeprefix(base_name): _shape(cut) for cut in cuts if len(cut.queries) < cut.site.heads}
    before = getattr(model.config, "pruned_attention", {})
    reshape_(model, shapes)
    model.config.pruned_attention = {**before, **shapes}
    for cut, tensors in zip(cuts, weights, strict=True):
        for path, (weight, bias) in tensors.items():
            _fill_(_projection_after(model, cut, path), weight, bias)
    return model


@torch.no_grad()
def zero_heads_(model: Model, mask: Tensor, *, values: Tensor | None = None) -> Model:
    """Fold gates ``mask * values`` into the output projections and keep the dense shape (the *masked* form)."""
    sites = find_attention(model)
    mask = _checked(mask, sites)
    gates = mask if values is None else mask * values.detach().cpu()
    for site, gate in zip(sites, gates.split([site.heads for site in sites]), strict=True):
        columns = weight_by_output(site.output)
        columns.mul_(gate.to(columns).repeat_interleave(site.head_dim))
    return model


def check_removable(sites: tuple[AttentionSite, ...]) -> None:
    """Whether heads can be removed from these sites.

    Raises:
        GateError: for attention with parameters per head beside its projections (attention sinks, norms over all heads),
            which would have to be cut as well.
    """
    for site in sites:
        own = {f"{path}.{name}" for path in site.layout.paths for name in ("weight", "bias")}
        prefix = f"{site.layout.core}." if site.layout.core else ""
        for name, parameter in site.core.named_parameters():
            if prefix + name not in own and parameter.numel() != site.head_dim:
                raise GateError(
                    f"{type(site.core).__name__} at {site.name!r} has the parameter {name!r} beside its "
                    "projections; removing heads from such attention is not implemented"
                )


def _checked(mask: Tensor, sites: tuple[AttentionSite, ...]) -> Tensor:
    """The mask on the CPU, if it fits and no gates are attached."""
    if any(getattr(site.output, "_head_gates", False) for site in sites):
        raise GateError("gates are attached to this model; detach() them before removing heads")
    mask, heads = mask.detach().cpu(), sum(site.heads for site in sites)
    if mask.shape != (heads,) or not bool(((mask == 0) | (mask == 1)).all()):
        raise GateError(f"the mask has shape {list(mask.shape)}; expected zeros and ones for {heads} heads")
    return mask


def kept_heads(sites: tuple[AttentionSite, ...], mask: Tensor) -> dict[str, list[int]]:
    """The indices of the heads each site keeps under a flat mask ``[heads]``."""
    parts = mask.split([site.heads for site in sites])
    return {site.name: part.nonzero().flatten().tolist() for site, part in zip(sites, parts, strict=True)}


def _cut(site: AttentionSite, keep: Tensor) -> _Cut:
    queries = keep.nonzero().flatten().tolist()
    group = site.heads // site.kv_heads
    members = [sum(head // group == key for head in queries) for key in range(site.kv_heads)]
    per_group = math.gcd(*members) or 1
    keys = [key for key, count in enumerate(members) for _ in range(count // per_group)]
    return _Cut(site, queries, keys, per_group)


def _rows(heads: list[int], head_dim: int, offset: int = 0) -> Tensor:
    starts = torch.tensor(heads, dtype=torch.long) * head_dim + offset
    return (starts.unsqueeze(1) + torch.arange(head_dim)).flatten()


def _kept_rows(cut: _Cut) -> dict[str, Tensor]:
    """Output features that stay in each input projection; fused ones hold query, key and value one after another."""
    site, layout = cut.site, cut.site.layout
    rows: dict[str, list[Tensor]] = {}
    offsets: dict[str, int] = {}
    for path, heads, dense in (
        (layout.query, cut.queries, site.heads),
        (layout.key, cut.keys, site.kv_heads),
        (layout.value, cut.keys, site.kv_heads),
    ):
        offset = offsets.get(path, 0)
        rows.setdefault(path, []).append(_rows(heads, site.head_dim, offset))
        offsets[path] = offset + dense * site.head_dim
    return {path: torch.cat(parts) for path, parts in rows.items()}


def _sliced(cut: _Cut, gate: Tensor) -> dict[str, tuple[Tensor, Tensor | None]]:
    """New weights ``[out, in]`` and biases of one site's projections."""
    site = cut.site
    new: dict[str, tuple[Tensor, Tensor | None]] = {}
    for path, rows in _kept_rows(cut).items():
        projection = site.projection(path)
        rows = rows.to(projection.weight.device)
        bias = None if projection.bias is None else projection.bias[rows].clone()
        new[path] = (weight_by_output(projection)[rows].clone(), bias)
    columns = _rows(cut.queries, site.head_dim).to(site.output.weight.device)
    scale = gate[cut.queries].repeat_interleave(site.head_dim).to(site.output.weight)
    bias = None if site.output.bias is None else site.output.bias.clone()
    new[site.layout.output] = (weight_by_output(site.output)[:, columns] * scale, bias)
    return new


def _shape(cut: _Cut) -> dict[str, Any]:
    site, layout = cut.site, cut.site.layout
    shape: dict[str, Any] = {"heads": len(cut.queries), "kv_heads": len(cut.keys), "projections": {}, "attributes": {}}
    if not cut.queries:
        shape["headless"] = {"core": layout.core, "output": layout.output, "kind": site.kind}
        return shape
    for path, rows in _kept_rows(cut).items():
        shape["projections"][path] = [weight_by_output(site.projection(path)).shape[1], len(rows)]
    width = len(cut.queries) * site.head_dim
    shape["projections"][layout.output] = [width, weight_by_output(site.output).shape[0]]
    settings = {
        **dict.fromkeys(COUNT_NAMES, len(cut.queries)),
        **dict.fromkeys(WIDTH_NAMES, width),
        "num_key_value_heads": len(cut.keys),
        "num_key_value_groups": cut.per_group,
    }
    prefix = f"{layout.core}." if layout.core else ""
    for name, value in settings.items():
        if hasattr(site.core, name):
            shape["attributes"][prefix + name] = value
    return shape


def _base_name(model: PreTrainedModel) -> str:
    """Prefix of the base model's modules, such as ``bert.`` (empty for a base model itself)."""
    return next((f"{name}." for name, module in model.named_modules() if name and module is model.base_model), "")


def _projection_after(model: nn.Module, cut: _Cut, path: str) -> nn.Module | None:
    """The projection as it is after reshaping; None where a headless site has dropped it."""
    if not cut.queries and path != cut.site.layout.output:
        return None
    name = f"{cut.site.name}.{path}" if cut.site.name else path
    return model.get_submodule(name)


def _fill_(projection: nn.Module | None, weight: Tensor, bias: Tensor | None) -> None:
    if projection is None:
        return
    if isinstance(projection, (nn.Linear, Conv1D)):
        weight_by_output(projection).copy_(weight)
    if bias is not None:
        projection.bias.copy_(bias)  # type: ignore[operator]
