"""Compute the weights and the shape of one attention site after heads are removed.

This module only computes indices and slices of weights; :mod:`gates.surgery.remove` puts the result into the model.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gates.attention.layouts import Fusion
from gates.attention.sites import AttentionSite, find_module, weight_by_output
from gates.modeling_pruned import Selected, is_of

# Further parts of an attention module with an axis of heads: sinks, norms, tables of positions, biases.

BY_HEAD = (
    *((name, 0) for name in ("logit_scale", "r_w_bias", "r_r_bias", "r_s_bias")),
    *((name, 1) for name in ("r_kernel", "seg_embed")),
    *((name, 1) for name in ("relative_position_bias_table", "relative_position_bias.relative_position_bias_table")),
)
"""Parameters with an axis of heads, and the index of this axis: position biases of Swin and BEiT, and Funnel's."""
Side = Literal["query", "key"]
OWN_PARTS: dict[str, Side] = {
    **dict.fromkeys(("sinks", "pos_bias_u", "pos_bias_v", "bias_u", "bias_v", "q_norm", "q_layernorm"), "query"),
    **dict.fromkeys(("k_norm", "k_layernorm"), "key"),
}
"""Parts of the core that may have an axis of heads, and the projection whose heads they have."""
BY_FEATURE: dict[str, Side] = {"q_bias": "query", "v_bias": "key"}
"""DeBERTa's parameters with the features of all heads, and the projection whose heads they have."""


@dataclass(frozen=True)
class PerHead:
    """Describe a parameter, or a list of modules, with an axis of heads that is not a projection."""

    path: str  # The path of the parameter or of the module
    follows: Side  # The projection whose heads it belongs to, ``query`` or ``key``
    # The form of the part. ``rows``: ``axis`` counts heads. ``features``: it has the features of all heads. ``packed``: its
    # first axis has query, key and value of all heads. ``modules``: one module per head. ``spanning``: a norm over the features
    # of all heads, which it still needs after a cut.
    form: Literal["rows", "features", "packed", "modules", "spanning"]
    before: str = ""  # The path of the projection before a spanning norm
    axis: int = 0  # The axis that counts heads


def per_head_parts(site: AttentionSite) -> list[PerHead]:
    """Return the parts with an axis of heads, such as GPT-OSS's sinks, norms per head (Cohere) and over all heads (OLMo2)."""
    found: list[PerHead] = []
    if site.layout.packed:
        names = [f"{site.layout.packed}_{end}" for end in ("weight", "bias")]
        return [PerHead(name, "query", "packed") for name in names if getattr(site.core, name, None) is not None]
    for path, side in OWN_PARTS.items():
        part, heads = getattr(site.core, path, None), site.heads if side == "query" else site.kv_heads
        if isinstance(part, nn.Parameter):
            found.append(PerHead(path, side, "rows"))
        elif isinstance(getattr(part, "norms", None), nn.ModuleList):
            found.append(PerHead(f"{path}.norms", side, "modules"))
        elif isinstance(weight := getattr(getattr(part, "norm", part), "weight", None), Tensor):
            if tuple(weight.shape) == (heads, site.head_dim):
                found.append(PerHead(f"{path}.weight", side, "rows"))
            elif weight.numel() != site.head_dim or is_of(type(part), Selected):
                found.append(PerHead(path, side, "spanning", site.layout.query if side == "query" else site.layout.key))
    prefix = f"{site.layout.core}." if site.layout.core else ""
    parameters = dict(site.core.named_parameters())
    for path, axis in BY_HEAD:
        if path in parameters and parameters[path].shape[axis] == site.heads:
            found.append(PerHead(prefix + path, "query", "rows", axis=axis))
    for path, side in BY_FEATURE.items():
        if path in parameters and parameters[path].shape == (site.heads * site.head_dim,):
            found.append(PerHead(prefix + path, side, "features"))
    return found


@functools.cache
def returned(forward: Callable[..., Any], output: str) -> tuple[int, bool]:
    """Return how many outputs a forward pass has, and whether they are a list, judged by its code.

    The number is 1 for a single tensor. It is 2, the output and the attention probabilities or None, where the code returns
    more or cannot be read. A module that replaces the attention has to return the same number.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError):
        return 2, False
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    if not values:
        return 2, False
    value = _last_assigned(tree, values[-1])
    if isinstance(value, ast.Call) and _calls_output(value, output):
        return 1, False
    return 2, isinstance(value, ast.List) or (isinstance(value, ast.BinOp) and isinstance(value.left, ast.List))


def _last_assigned(tree: ast.AST, value: ast.expr) -> ast.expr:
    """Return the expression that a name was last assigned; any other expression is returned unchanged."""
    if not isinstance(value, ast.Name):
        return value
    assigned = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == value.id for to in node.targets)
    ]
    return max(assigned, key=lambda one: one.lineno, default=value)


def _calls_output(call: ast.Call, output: str) -> bool:
    """Return whether an expression calls the output projection, or a dropout on its result."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return name in (output.split(".")[0], "dropout", "resid_dropout", "proj_drop", "out_drop", "to_out", "projection_dropout")


COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
WIDTH_NAMES = ("all_head_size", "split_size", "inner_dim", "embed_dim")
KEY_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads")
OWN_WIDTH_NAMES: dict[str, tuple[str, ...]] = {"DbrxAttention": ("hidden_size",)}
"""Attributes that have the number of features of all heads only in these classes."""
READ_CONFIG: dict[str, tuple[str, ...]] = {
    "Phi3Attention": ("num_attention_heads",),
    "MoonshineAttention": ("num_key_value_heads",),
    "FunnelRelMultiheadAttention": ("n_head", "num_attention_heads"),
}
"""The config fields from which attention classes read their number of heads at every call."""
SHARED_BY_HEADS = ("distance_embedding", "rel_pos_h", "rel_pos_w", "rel_pos_emb", "self.continuous_position_bias_mlp.0")
"""Position tables and networks that all heads share."""
MASKED_BY_HEAD = ("BeitAttention", "EomtAttention", "EomtDinov3Attention")
"""Attention whose mask has an axis of heads."""
BY_OWN_SIZE = ("BlipAttention", "Blip2Attention", "InstructBlipAttention", "InstructBlipVideoAttention")
"""Attention that assumes its heads together are as wide as its input. After a cut it gets another forward pass."""
STACK_BIAS_CLASSES = ("UdopAttention",)
"""Attention like T5's, except that the position bias in the encoder belongs to the stack and passes from layer to layer."""


@dataclass(frozen=True)
class Cut:
    """Hold the kept query heads of a site, the key/value head of each remaining group, and the queries per group."""

    site: AttentionSite
    queries: list[int]
    keys: list[int]
    per_group: int


def cut_site(site: AttentionSite, keep: Tensor) -> Cut:
    """Return the kept heads of ``site`` under a mask of 0 and 1, ``[heads]``.

    Keys are repeated until all groups have the same number of queries: the greatest common divisor of their numbers.
    """
    queries = keep.nonzero().flatten().tolist()
    group = site.heads // site.kv_heads
    members = [sum(head // group == key for head in queries) for key in range(site.kv_heads)]
    per_group = math.gcd(*members) or 1
    keys = [key for key, count in enumerate(members) for _ in range(count // per_group)]
    return Cut(site, queries, keys, per_group)


def _rows(heads: list[int], head_dim: int) -> Tensor:
    """Return the indices of the features of these heads among the features of all heads."""
    starts = torch.tensor(heads, dtype=torch.long) * head_dim
    return (starts.unsqueeze(1) + torch.arange(head_dim)).flatten()


def input_projections(site: AttentionSite) -> list[tuple[str, tuple[str, ...]]]:
    """Return the paths of a site's input projections, each with its parts (query, key, value)."""
    layout = site.layout
    if layout.packed:
        return []
    held: dict[str, tuple[str, ...]] = {}
    for part in ("query", "key", "value"):
        held[getattr(layout, part)] = (*held.get(getattr(layout, part), ()), part)
    further = [(path, ("query",)) for path in layout.with_query] + [(path, ("key",)) for path in layout.with_key]
    return [*held.items(), *((path, parts) for path, parts in further if find_module(site.module, path) is not None)]


def _fused(fusion: Fusion, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return one projection's features in the order of its family, from rows of queries ``[heads, head_dim]`` and of keys and
    values ``[kv_heads, head_dim]``."""
    if fusion == "groups":
        grouped = query.unflatten(0, (len(key), len(query) // max(1, len(key))))
        return torch.cat([grouped, key.unsqueeze(1), value.unsqueeze(1)], dim=1).flatten()
    if fusion == "quarters":
        return torch.cat([part.reshape(4, -1) for part in (query, value, key)], dim=1).flatten()
    return torch.cat([query.flatten(), key.flatten(), value.flatten()])


def rows_of_parts(site: AttentionSite) -> dict[str, tuple[str, Tensor]]:
    """Return for query, key and value the path of the projection and the indices of its output features by head,
    ``[heads, head_dim]``; ``[kv_heads, head_dim]`` for key and value."""
    counts = {"query": site.heads, "key": site.kv_heads, "value": site.kv_heads}
    found: dict[str, tuple[str, Tensor]] = {}
    for path, parts in input_projections(site):
        held = [part for part in parts if part not in found]  # none for a further projection
        sizes = [counts[part] for part in held]
        width = _own_width(site, path, sizes[0]) if len(held) == 1 else site.head_dim
        labels = torch.arange(sum(sizes) * width).view(-1, width).split(sizes)
        if len(held) == 3:
            place = _fused(site.layout.fusion, *labels).argsort()  # the position of the feature with a given label
            labels = tuple(place[label] for label in labels)
        found |= {part: (path, rows) for part, rows in zip(held, labels, strict=True)}
    return found


def _own_width(site: AttentionSite, path: str, heads: int) -> int:
    """Return the features per head in a projection of one part. Qwen3-Next's queries are wider because they include a gate."""
    part = find_module(site.module, path)
    if part is None or any(is_of(type(other), Selected) for other in site.module.modules()):
        return site.head_dim  # a norm over all heads keeps the rows of removed heads
    return max(site.head_dim, weight_by_output(site.projection(path)).shape[0] // heads)


def _further_width(site: AttentionSite, path: str, part: str) -> int:
    """Return the features per head in a further projection: one, if it is a gate for each head."""
    features = weight_by_output(site.projection(path)).shape[0]
    return features // (site.heads if part == "query" else site.kv_heads)


def _kept_rows(cut: Cut) -> dict[str, Tensor]:
    """Return the kept output features of each input projection, in their new order."""
    site = cut.site
    kept = {"query": cut.queries, "key": cut.keys, "value": cut.keys}
    of_part = {part: rows[kept[part]] for part, (_, rows) in rows_of_parts(site).items()}
    whole = {part.before for part in per_head_parts(site) if part.form == "spanning"}
    rows: dict[str, Tensor] = {}
    for path, parts in input_projections(site):
        if path in whole:
            rows[path] = torch.arange(weight_by_output(site.projection(path)).shape[0])
        elif len(parts) == 1 and path not in (site.layout.query, site.layout.key, site.layout.value):
            rows[path] = _rows(kept[parts[0]], _further_width(site, path, parts[0]))
        elif len(parts) < 3:
            rows[path] = torch.cat([of_part[part].flatten() for part in parts])
        else:
            rows[path] = _fused(site.layout.fusion, of_part["query"], of_part["key"], of_part["value"])
    return rows


def sliced_projections(cut: Cut, gate: Tensor) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return the new weights ``[out, in]`` and biases of a site's projections."""
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


def sliced_per_head(cut: Cut) -> dict[str, Tensor]:
    """Return the new values of all further parameters and buffers with an axis of heads, by path."""
    new: dict[str, Tensor] = {}
    for part in per_head_parts(cut.site):
        heads = cut.queries if part.follows == "query" else cut.keys
        if part.form == "rows":
            old = cut.site.module.get_parameter(part.path)
            new[part.path] = old.index_select(part.axis, torch.tensor(heads, dtype=torch.long, device=old.device))
        elif part.form == "features":
            new[part.path] = cut.site.module.get_parameter(part.path)[_rows(heads, cut.site.head_dim)].clone()
        elif part.form == "packed":
            by_head = cut.site.module.get_parameter(part.path).unflatten(0, (3, cut.site.heads, cut.site.head_dim))
            new[part.path] = by_head[:, heads].flatten(0, 2).clone()
        elif part.form == "modules":
            norms = cut.site.module.get_submodule(part.path)
            for index, head in enumerate(heads):
                for name, parameter in norms.get_submodule(str(head)).named_parameters():
                    new[f"{part.path}.{index}.{name}"] = parameter.clone()
        else:
            norm, rows = cut.site.module.get_submodule(part.path), _rows(heads, cut.site.head_dim)
            new[f"{part.path}.index"] = norm.get_buffer("index").cpu()[rows] if is_of(type(norm), Selected) else rows
    if _arguments(cut.site):
        known = cut.site.core._buffers.get("kept_heads")
        queries = torch.tensor(cut.queries, dtype=torch.long)
        new["kept_heads"] = queries if known is None else known.cpu()[queries]
    return new


def _arguments(site: AttentionSite) -> list[str]:
    """Return the inputs of a site with an axis of heads; none for T5, which computes its position bias itself."""
    names = inspect.signature(type(site.core).forward).parameters
    candidates = ("attention_mask",) if type(site.core).__name__ in MASKED_BY_HEAD else site.layout.arguments
    return [] if _is_t5(site) else [name for name in candidates if name in names]


def _is_t5(site: AttentionSite) -> bool:
    return hasattr(site.core, "has_relative_attention_bias") and not _has_stack_bias(site)


def _has_stack_bias(site: AttentionSite) -> bool:
    return type(site.core).__name__ in STACK_BIAS_CLASSES and not getattr(site.core, "is_decoder", False)


def shares_bias(site: AttentionSite) -> bool:
    """Return whether one layer passes its position bias to the others, as in T5 and mT5, but not in UMT5."""
    return _is_t5(site) and "position_bias" in inspect.signature(type(site.core).forward).parameters


def position_biases(sites: tuple[AttentionSite, ...]) -> dict[str, Tensor | None]:
    """Return T5's table ``[buckets, heads]`` for each site: its own or that of its stack's first layer; None for
    cross-attention."""
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


def new_shape(cut: Cut) -> dict[str, Any]:
    """Return the shape of one site for :func:`gates.modeling_pruned.reshape_`."""
    site, layout = cut.site, cut.site.layout
    shape: dict[str, Any] = {"heads": len(cut.queries), "kv_heads": len(cut.keys), "projections": {}, "attributes": {}}
    adds = layout.adds
    if adds == "residual" and adds not in inspect.signature(type(site.core).forward).parameters:
        adds = ""  # among the models with this layout, only BLOOM adds it inside its attention
    if not cut.queries:
        shape["headless"] = {"core": layout.core, "output": layout.output, "kind": site.kind, "adds": adds}
        count, as_list = returned(type(site.core).forward, layout.output)
        # T5 also returns its position bias
        shape["headless"]["returns"] = 3 if shares_bias(site) or _has_stack_bias(site) else count
        if as_list:
            shape["headless"]["as_list"] = True
        if _has_stack_bias(site) and getattr(site.core, "has_relative_attention_bias", False):
            shape["headless"]["keeps"] = ["relative_attention_bias"]  # unused here, but shared with the stack's biases
        return shape
    for path, rows in _kept_rows(cut).items():
        shape["projections"][path] = [weight_by_output(site.projection(path)).shape[1], len(rows)]
    width = len(cut.queries) * site.head_dim
    shape["projections"][layout.output] = [width, weight_by_output(site.output).shape[0]]
    settings = {
        **dict.fromkeys(COUNT_NAMES, len(cut.queries)),
        **dict.fromkeys((*WIDTH_NAMES, *OWN_WIDTH_NAMES.get(type(site.core).__name__, ())), width),
        **dict.fromkeys(KEY_COUNT_NAMES, len(cut.keys)),
        "num_key_value_groups": cut.per_group,
    }
    prefix = f"{layout.core}." if layout.core else ""
    shape["attributes"] = {prefix + name: value for name, value in settings.items() if hasattr(site.core, name)}
    kept = sliced_per_head(cut)
    for part in per_head_parts(site):
        count = len(cut.queries if part.follows == "query" else cut.keys)
        if part.form == "modules":
            shape.setdefault("modules", {})[part.path] = count
        elif part.form == "spanning":
            shape.setdefault("selected", {})[part.path] = count * site.head_dim
        else:
            shape.setdefault("parameters", {})[part.path] = list(kept[part.path].shape)
    if fields := READ_CONFIG.get(type(site.core).__name__):
        shape["config"] = {field: len(cut.keys if field in KEY_COUNT_NAMES else cut.queries) for field in fields}
    if names := _arguments(site):
        of = vars(site.core).get("head_arguments", {"of": site.heads})["of"]
        shape["arguments"] = {"names": names, "of": of}
        if _has_stack_bias(site):
            shape["arguments"]["handed_on"] = "position_bias"
    if layout.packed:
        of_all, of = vars(site.core).get("kept_of", (range(site.heads), site.heads))
        shape["multihead"] = {"kept": [of_all[head] for head in cut.queries], "of": of}
    if layout.fusion == "quarters":
        shape["flat_heads"] = True
    if type(site.core).__name__ in BY_OWN_SIZE:
        shape["own_size"] = True
    return shape
