"""Remove attention heads for good: fewer rows in query, key and value, fewer columns in the output projection."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.pruned import Selected, reshape_
from gates.sites import AttentionSite, Fusion, find_attention, find_module, weight_by_output

Model = TypeVar("Model", bound=PreTrainedModel)

COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
WIDTH_NAMES = ("all_head_size", "split_size", "inner_dim", "embed_dim")
KEY_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads")
READ_CONFIG_CLASSES = ("Phi3Attention",)
"""Attention that reads its head count from the model's config at every call."""


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

    further = [_slice_per_head(cut) for cut in cuts]
    tables = _position_biases(model, sites)

    base_name = _base_name(model)
    changed = [cut for cut in cuts if len(cut.queries) < cut.site.heads]
    if changed and any(_shares_bias(cut.site) for cut in cuts):
        changed = cuts  # biases are passed on from layer to layer, so all layers have to compute their own
    shapes = {}
    for cut in changed:
        shape = shapes[cut.site.name.removeprefix(base_name)] = _shape(cut)
        if cut.site.name in tables and cut.queries:
            table = tables[cut.site.name]
            shape["own_bias"] = 0 if table is None else len(table)
            if table is not None:
                further[cuts.index(cut)]["relative_attention_bias.weight"] = table[:, cut.queries].clone()
    before = getattr(model.config, "pruned_attention", {})
    reshape_(model, shapes)
    model.config.pruned_attention = {**before, **shapes}
    for cut, projections, tensors in zip(cuts, weights, further, strict=True):
        for path, (weight, bias) in projections.items():
            _fill_(_projection_after(model, cut, path), weight, bias)
        if cut in changed and cut.queries:
            site = model.get_submodule(cut.site.name)
            for path, tensor in tensors.items():
                owner, _, name = path.rpartition(".")
                getattr(site.get_submodule(owner), name).copy_(tensor)
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
        GateError: for attention whose heads can only be gated, or with parameters of unknown shape beside its projections,
            which might have to be cut as well.
    """
    for site in sites:
        if site.gate_only:
            raise GateError(
                f"heads of {type(site.core).__name__} (at {site.name!r}) can be gated but not removed: {site.gate_only}; "
                "use form='masked'"
            )
        known = (
            {path for path, _ in _projections(site)}
            | {part.path for part in _per_head(site)}
            | {
                site.layout.output,
                site.layout.adds,
                "relative_attention_bias",
            }
        )
        for name, parameter in site.core.named_parameters():
            path = f"{site.layout.core}.{name}".lstrip(".")
            if not any(path == part or path.startswith(f"{part}.") for part in known) and parameter.numel() != site.head_dim:
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


def _rows(heads: list[int], head_dim: int) -> Tensor:
    """The features of these heads among the features of all heads."""
    starts = torch.tensor(heads, dtype=torch.long) * head_dim
    return (starts.unsqueeze(1) + torch.arange(head_dim)).flatten()


# -- projections -----------------------------------------------------------------------------------------------


def _projections(site: AttentionSite) -> list[tuple[str, tuple[str, ...]]]:
    """The paths of a site's input projections, each with the parts (query, key, value) that it holds."""
    layout = site.layout
    held: dict[str, tuple[str, ...]] = {}
    for part in ("query", "key", "value"):
        held[getattr(layout, part)] = (*held.get(getattr(layout, part), ()), part)
    further = [(path, ("query",)) for path in layout.with_query] + [(path, ("key",)) for path in layout.with_key]
    return [*held.items(), *((path, parts) for path, parts in further if find_module(site.module, path) is not None)]


def _fused(fusion: Fusion, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One projection's features in the order its family keeps them.

    Args:
        query: ``[heads, head_dim]``.
        key, value: ``[kv_heads, head_dim]``.
    """
    if fusion == "groups":
        grouped = query.unflatten(0, (len(key), len(query) // max(1, len(key))))
        return torch.cat([grouped, key.unsqueeze(1), value.unsqueeze(1)], dim=1).flatten()
    if fusion == "quarters":
        return torch.cat([part.reshape(4, -1) for part in (query, value, key)], dim=1).flatten()
    return torch.cat([query.flatten(), key.flatten(), value.flatten()])


def _kept_rows(cut: _Cut) -> dict[str, Tensor]:
    """Output features that stay in each input projection, in their new order."""
    site = cut.site
    counts = {"query": site.heads, "key": site.kv_heads, "value": site.kv_heads}
    kept = {"query": cut.queries, "key": cut.keys, "value": cut.keys}
    whole = {part.before for part in _per_head(site) if part.form == "spanning"}
    rows: dict[str, Tensor] = {}
    for path, parts in _projections(site):
        if path in whole:
            rows[path] = torch.arange(weight_by_output(site.projection(path)).shape[0])
        elif len(parts) < 3:
            offsets = [sum(counts[before] for before in parts[:index]) for index in range(len(parts))]
            heads = [offset + head for part, offset in zip(parts, offsets, strict=True) for head in kept[part]]
            rows[path] = _rows(heads, site.head_dim)
        else:
            features = torch.arange(sum(counts.values()) * site.head_dim)
            labels = features.view(-1, site.head_dim).split(list(counts.values()))
            place = _fused(site.layout.fusion, *labels).argsort()  # where the feature with a given label is kept
            query, key, value = (place[part[kept[name]]] for name, part in zip(counts, labels, strict=True))
            rows[path] = _fused(site.layout.fusion, query, key, value)
    return rows


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


# -- what else has an axis of heads ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _PerHead:
    """A parameter, or a list of modules, with an axis of heads beside the projections.

    Args:
        path: of the parameter, or of the module.
        follows: whose heads it belongs to.
        form: ``rows``: its first axis counts heads; ``modules``: one module per head; ``spanning``: a norm over the features
            of all heads together, which has to go on seeing them.
        before: for a spanning norm, the path of the projection before it.
    """

    path: str
    follows: Literal["query", "key"]
    form: Literal["rows", "modules", "spanning"]
    before: str = ""


def _per_head(site: AttentionSite) -> list[_PerHead]:
    """GPT-OSS's sinks, Cohere's and StableLM's norms per head, OLMo2's norms over all heads; norms shared by heads stay."""
    found: list[_PerHead] = []
    for path, follows, heads in (
        ("sinks", "query", site.heads),
        ("q_norm", "query", site.heads),
        ("k_norm", "key", site.kv_heads),
        ("q_layernorm", "query", site.heads),
        ("k_layernorm", "key", site.kv_heads),
    ):
        part = getattr(site.core, path, None)
        if isinstance(part, nn.Parameter):
            found.append(_PerHead(path, follows, "rows"))  # type: ignore[arg-type]
        elif isinstance(getattr(part, "norms", None), nn.ModuleList):
            found.append(_PerHead(f"{path}.norms", follows, "modules"))  # type: ignore[arg-type]
        elif isinstance(weight := getattr(getattr(part, "norm", part), "weight", None), Tensor):
            if tuple(weight.shape) == (heads, site.head_dim):
                found.append(_PerHead(f"{path}.weight", follows, "rows"))  # type: ignore[arg-type]
            elif weight.numel() != site.head_dim or isinstance(part, Selected):
                before = site.layout.query if follows == "query" else site.layout.key
                found.append(_PerHead(path, follows, "spanning", before))  # type: ignore[arg-type]
    return found


def _slice_per_head(cut: _Cut) -> dict[str, Tensor]:
    """The new values of all that has an axis of heads, by path of the parameter or buffer."""
    new: dict[str, Tensor] = {}
    for part in _per_head(cut.site):
        heads = cut.queries if part.follows == "query" else cut.keys
        if part.form == "rows":
            new[part.path] = cut.site.module.get_parameter(part.path)[heads].clone()
        elif part.form == "modules":
            norms = cut.site.module.get_submodule(part.path)
            for index, head in enumerate(heads):
                for name, parameter in norms.get_submodule(str(head)).named_parameters():
                    new[f"{part.path}.{index}.{name}"] = parameter.clone()
        else:
            norm, rows = cut.site.module.get_submodule(part.path), _rows(heads, cut.site.head_dim)
            new[f"{part.path}.index"] = norm.get_buffer("index").cpu()[rows] if isinstance(norm, Selected) else rows
    if _arguments(cut.site):
        old = cut.site.core._buffers.get("kept_heads")
        queries = torch.tensor(cut.queries, dtype=torch.long)
        new["kept_heads"] = queries if old is None else old.cpu()[queries]
    return new


def _arguments(site: AttentionSite) -> list[str]:
    """The inputs of a site that have an axis of heads; T5 can compute its position bias itself, and does."""
    names = inspect.signature(type(site.core).forward).parameters
    return [] if _is_t5(site) else [name for name in site.layout.arguments if name in names]


def _is_t5(site: AttentionSite) -> bool:
    return hasattr(site.core, "has_relative_attention_bias")


def _shares_bias(site: AttentionSite) -> bool:
    """Whether the position bias of one layer is handed on to the others (in T5 and mT5, but not in UMT5)."""
    return _is_t5(site) and "position_bias" in inspect.signature(type(site.core).forward).parameters


def _position_biases(model: nn.Module, sites: tuple[AttentionSite, ...]) -> dict[str, Tensor | None]:
    """T5's table ``[buckets, heads]`` for each site: its own or that of its stack's first layer; None for cross-attention."""
    found: dict[str, Tensor | None] = {}
    table: Tensor | None = None
    for site in sites:
        if not _is_t5(site):
            continue
        if site.kind == "cross":
            found[site.name] = None
        else:
            own = getattr(site.core, "relative_attention_bias", None)
            if isinstance(own, nn.Embedding):
                table = own.weight
            found[site.name] = table
    return found


# -- shapes ----------------------------------------------------------------------------------------------------


def _shape(cut: _Cut) -> dict[str, Any]:
    """What :func:`gates.pruned.reshape_` needs to know of one site."""
    site, layout = cut.site, cut.site.layout
    shape: dict[str, Any] = {"heads": len(cut.queries), "kv_heads": len(cut.keys), "projections": {}, "attributes": {}}
    adds = (
        layout.adds if layout.adds != "residual" or "residual" in inspect.signature(type(site.core).forward).parameters else ""
    )
    if not cut.queries:
        shape["headless"] = {"core": layout.core, "output": layout.output, "kind": site.kind, "adds": adds}
        shape["headless"]["returns"] = 3 if _shares_bias(site) else 2  # T5 hands on its position bias
        return shape
    for path, rows in _kept_rows(cut).items():
        shape["projections"][path] = [weight_by_output(site.projection(path)).shape[1], len(rows)]
    width = len(cut.queries) * site.head_dim
    shape["projections"][layout.output] = [width, weight_by_output(site.output).shape[0]]
    settings = {
        **dict.fromkeys(COUNT_NAMES, len(cut.queries)),
        **dict.fromkeys(WIDTH_NAMES, width),
        **dict.fromkeys(KEY_COUNT_NAMES, len(cut.keys)),
        "num_key_value_groups": cut.per_group,
    }
    prefix = f"{layout.core}." if layout.core else ""
    shape["attributes"] = {prefix + name: value for name, value in settings.items() if hasattr(site.core, name)}
    for part in _per_head(site):
        count = len(cut.queries if part.follows == "query" else cut.keys)
        if part.form == "rows":
            size = site.module.get_parameter(part.path).shape
            shape.setdefault("parameters", {})[part.path] = [count, *size[1:]]
        elif part.form == "modules":
            shape.setdefault("modules", {})[part.path] = count
        else:
            shape.setdefault("selected", {})[part.path] = count * site.head_dim
    if type(site.core).__name__ in READ_CONFIG_CLASSES:
        shape["config"] = {"num_attention_heads": len(cut.queries)}
    if names := _arguments(site):
        of = vars(site.core).get("head_arguments", {"of": site.heads})["of"]
        shape["arguments"] = {"names": names, "of": of}
    if layout.fusion == "quarters":
        shape["flat_heads"] = True
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
