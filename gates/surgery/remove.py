"""Remove attention heads for good: fewer rows in query, key and value, fewer columns in the output projection."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gates.attention.layouts import check_merged, without_adapter
from gates.attention.sites import AttentionSite, Projection, find_attention, weight_by_output
from gates.errors import GateError, first_line
from gates.gating.budget import check_mask
from gates.modeling_pruned import reshape_
from gates.surgery.modeling_file import saves_pruned_shape_
from gates.surgery.slices import (
    SHARED_BY_HEADS,
    Cut,
    cut_site,
    input_projections,
    new_shape,
    per_head_parts,
    position_biases,
    shares_bias,
    sliced_per_head,
    sliced_projections,
)
from gates.surgery.verify import verified

# Which weights heads can be taken out of: plain numbers in memory, that nothing else shares.

PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Numbers that mean what they say, and can be multiplied."""
FIRST = "dequantise the model first, or close heads before it is quantised"


def check_in_memory(model: nn.Module) -> None:
    """Whether all weights of a model are there."""
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
    """Whether rows and columns can be taken out of all projections of these sites."""
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


Model = TypeVar("Model", bound=PreTrainedModel)


@torch.no_grad()
def remove_heads_(
    model: Model, mask: Tensor, *, values: Tensor | None = None, example: Mapping[str, Any] | None = None
) -> Model:
    """Physically remove the heads where ``mask`` is 0, in place.

    The result computes what the gated model computes in evaluation mode with gates ``mask * values``. This is checked by a
    forward pass before and one after, on two short texts, or one picture or sound; what was checked once in a process (the same
    class, config, dtypes and number of heads left at each site) is not checked again. If it fails, the model is left as it was;
    until then the old attention weights are kept beside the new ones.

    Under grouped-query attention a key/value head stays while one of its query heads does; where the groups keep
    different numbers of query heads, key/value heads are repeated so that all groups are again of one size (their
    greatest common divisor), which is exact but can store more keys than the dense model did: see the shapes in
    ``model.config.pruned_attention``. A site that keeps no head keeps its output projection's bias. Weights that sites
    shared are their own afterwards, where heads went.

    Args:
        model: Transformers model without attached gates, or a module of one's own around one. Its weights must be plain
            floating-point numbers: neither on the meta device or offloaded, nor quantised, nor spread over devices by tensor
            parallelism or FSDP.
        mask: 0/1 per head, ``[heads]`` in site order.
        values: gate values to fold into the output projection, ``[heads]``; ones by default.
        example: keyword arguments of a forward pass for the check; random inputs by default, for models whose kind of input is
            known.

    Returns:
        The same model. ``model.config.pruned_attention`` says what was done, and its ``save_pretrained`` writes the modeling
        file that the weights load with.

    Raises:
        GateError: if gates are attached, adapters are not merged, the mask is of another model, the weights are of another
            kind, no inputs for the check are known, or the model without these heads fails or computes something else; nothing
            is changed then.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> _ = remove_heads_(model, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    >>> [site.heads for site in find_attention(model)]
    [3, 1]
    """
    check_merged(model)
    sites = find_attention(model)
    if (part := transformers_part(model, sites)) is not model:  # in a module of one's own
        remove_heads_(part, mask, values=values, example=example)
        return model
    check_removable(sites)
    check_in_memory(model)
    check_plain(sites)
    mask = _checked(mask, sites)
    values = torch.ones_like(mask) if values is None else _checked_values(values, mask)
    sizes = [site.heads for site in sites]
    cuts = [cut_site(site, keep) for site, keep in zip(sites, mask.split(sizes), strict=True)]
    tables = position_biases(sites)
    shapes = _new_shapes(cuts, tables)
    base_name = _base_name(model)
    below_base = {name.removeprefix(base_name): shape for name, shape in shapes.items()}
    before = getattr(model.config, "pruned_attention", {})
    with verified(model, mask * values, shapes, example=example):
        for cut, gate in zip(cuts, values.split(sizes), strict=True):
            name = cut.site.name.removeprefix(base_name)
            _cut_(model, cut, gate, tables.get(cut.site.name), {name: below_base[name]} if name in below_base else {})
        model.config.pruned_attention = {**before, **below_base}
    return saves_pruned_shape_(model)


@torch.no_grad()
def zero_heads_(model: Model, mask: Tensor, *, values: Tensor | None = None) -> Model:
    """Fold gates ``mask * values`` into the output projections and keep the dense shape (the *masked* form).

    Weights that several sites share are scaled once.

    Args:
        model: Transformers model without attached gates.
        mask: 0/1 per head, ``[heads]`` in site order.
        values: gate values to fold beside the mask, ``[heads]``; ones by default.

    Raises:
        GateError: if gates are attached, the mask is of another model, or the gates cannot be folded into the weights: shared
            by sites whose gates differ, quantised (where zeros mean zero, gates of 0 and 1 can), on the meta device or
            offloaded; nothing is changed then.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> _ = zero_heads_(model, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    >>> float(find_attention(model)[0].output.weight[:, 8:16].abs().sum().detach())  # the columns of head 1
    0.0
    """
    check_merged(model)
    sites = find_attention(model)
    check_in_memory(model)
    mask = _checked(mask, sites)
    gates = mask if values is None else mask * _checked_values(values, mask)
    fold_(sites, gates.split([site.heads for site in sites]), list(model.modules()))
    return model


def transformers_part(model: nn.Module, sites: Iterable[AttentionSite]) -> PreTrainedModel:
    """The Transformers model that has all sites: the model itself, or the outermost in a module of one's own around it."""
    needed = {id(site.module) for site in sites}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and needed <= {id(module) for module in part.modules()}:
            return part
    raise GateError(
        f"the attention of {type(model).__name__} is not all in one Transformers model, so its heads could not be removed; "
        "gate its Transformers models one by one"
    )


def check_removable(sites: tuple[AttentionSite, ...]) -> None:
    """Whether heads can be removed from these sites."""
    for site in sites:
        if site.gate_only:
            raise GateError(
                f"heads of {type(site.core).__name__} (at {site.name!r}) can be gated but not removed: {site.gate_only}; "
                "use form='masked'"
            )
        known = {path for path, _ in input_projections(site)} | {part.path for part in per_head_parts(site)}
        known |= {site.layout.output, site.layout.adds, "relative_attention_bias", *SHARED_BY_HEADS}
        for name, parameter in site.core.named_parameters():
            path = f"{site.layout.core}.{name}".lstrip(".")
            if not any(path == part or path.startswith(f"{part}.") for part in known) and parameter.numel() != site.head_dim:
                raise GateError(
                    f"{type(site.core).__name__} at {site.name!r} has the parameter {name!r} beside its "
                    "projections; removing heads from such attention is not implemented"
                )


def why_not_removable(sites: tuple[AttentionSite, ...]) -> str:
    """What :func:`check_removable` says of them, empty if nothing; such heads can be gated, and exported as zeros."""
    try:
        check_removable(sites)
    except GateError as error:
        return str(error)
    return ""


def _checked(mask: Tensor, sites: tuple[AttentionSite, ...]) -> Tensor:
    """The mask on the CPU, if it fits and no gates are attached."""
    if any(getattr(without_adapter(site.output), "_head_gates", False) for site in sites):
        raise GateError("gates are attached to this model; detach() them before removing heads")
    check_mask(mask, sum(site.heads for site in sites))
    return mask.detach().cpu()


def _checked_values(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise GateError(f"the gate values have shape {list(values.shape)}; expected one for each of {len(mask)} heads")
    if not bool(values.isfinite().all()):
        raise GateError(
            f"a gate value is {float(values[~values.isfinite()][0])}; expected numbers, 1 for a head that counts fully"
        )
    return values.detach().cpu()


def _base_name(model: PreTrainedModel) -> str:
    """Prefix of the base model's modules, such as ``bert.`` (empty for a base model itself)."""
    return next((f"{name}." for name, module in model.named_modules() if name and module is model.base_model), "")


def _new_shapes(cuts: list[Cut], tables: dict[str, Tensor | None]) -> dict[str, dict[str, Any]]:
    """Return the new shape of each site that changes, by name; ``tables`` are those of :func:`position_biases`."""
    any_cut = any(len(cut.queries) < cut.site.heads for cut in cuts)
    # Where biases are passed on from layer to layer, every layer computes its own now.
    changed = [cut for cut in cuts if len(cut.queries) < cut.site.heads or (any_cut and shares_bias(cut.site))]
    shapes = {cut.site.name: new_shape(cut) for cut in changed}
    for cut in changed:
        if cut.site.name in tables and cut.queries:
            table = tables[cut.site.name]
            shapes[cut.site.name]["own_bias"] = 0 if table is None else len(table)
    return shapes


def _cut_(model: PreTrainedModel, cut: Cut, gate: Tensor, table: Tensor | None, shape: dict[str, Any]) -> None:
    """Put what stays of one site into the model; no tensor that was there before is written to.

    Args:
        gate: gates to fold into the output projection, ``[heads]``.
        table: position biases ``[buckets, heads]`` that the site is to have of its own; None for none.
        shape: new shape by the site's name below the base model, for :func:`reshape_`; empty if it stays as it was.
    """
    name = cut.site.name
    if not shape:
        _scale_output_(cut.site, gate)
        return
    weights, tensors = sliced_projections(cut, gate), sliced_per_head(cut)
    if table is not None:
        tensors["relative_attention_bias.weight"] = table[:, cut.queries].clone()
    reshape_(model, shape)
    for path, (weight, bias) in weights.items():
        if cut.queries or path == cut.site.layout.output:  # a headless site has dropped the others
            _fill_(model.get_submodule(f"{name}.{path}".lstrip(".")), weight, bias)
    for path, tensor in tensors.items() if cut.queries else ():
        owner, _, parameter = f"{name}.{path}".rpartition(".")
        getattr(model.get_submodule(owner), parameter).copy_(tensor)


def _scale_output_(site: AttentionSite, gate: Tensor) -> None:
    """Fold gates ``[heads]`` into an output projection that keeps its shape, by a weight of its own."""
    if bool((gate == 1).all()):
        return
    old = site.output.weight
    scale = gate.repeat_interleave(site.head_dim).to(old)
    new = old * (scale.unsqueeze(1) if isinstance(site.output, Conv1D) else scale)
    site.output.weight = nn.Parameter(new, requires_grad=old.requires_grad)


def _fill_(projection: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    if isinstance(projection, (nn.Linear, Conv1D)):
        weight_by_output(projection).copy_(weight)
    if bias is not None:
        projection.bias.copy_(bias)  # type: ignore[operator]
