"""Remove attention heads physically: fewer rows in query, key and value, fewer columns in the output projection."""

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

FIRST = "dequantise the model first, or close heads before it is quantised"


def check_in_memory(model: nn.Module) -> None:
    """Raise an error if a weight of the model is not in memory."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise GateError(
                f"{name!r} of {type(model).__name__} is on the meta device (not loaded, or offloaded); load the whole model, "
                "without a device_map that offloads"
            )


def is_plain(projection: Projection) -> bool:
    """Return whether a projection's weight is a floating-point parameter, not quantised, derived or spread over devices."""
    weight = projection._parameters.get("weight")
    return type(weight) is nn.Parameter and weight.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_plain(sites: Sequence[AttentionSite]) -> None:
    """Raise an error unless all projections of these sites have plain weights."""
    for site in sites:
        for path in site.layout.paths:
            if not is_plain(site.projection(path)):
                raise GateError(
                    f"{path!r} of {site.name!r} holds {_kind(site.projection(path))}, but removing heads needs plain "
                    "floating-point weights; dequantise the model first, or remove heads before it is quantised"
                )


def fold_(sites: Sequence[AttentionSite], gates: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
    """Multiply each head's columns of the output projections by its gate. Weights that several sites share are scaled once.

    Each site has gates ``[heads]``. ``modules`` are those of the whole model, which may share weights. Nothing changes after an
    error.
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
            columns.mul_(gate.repeat_interleave(site.head_dim).to(columns))


def _check_shared(sites: Sequence[AttentionSite], gates: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
    """Raise an error unless all users of a shared output projection have the same gates."""
    first: dict[int, tuple[AttentionSite, Tensor]] = {}
    for site, gate in zip(sites, gates, strict=True):
        other, others = first.setdefault(id(site.output.weight), (site, gate))
        if not torch.equal(gate, others):
            raise GateError(
                f"{site.name!r} and {other.name!r} share the weights of their output projections but have different gates; "
                "give both the same gates, or remove the heads (remove_heads_)"
            )
    projections = {id(site.output) for site in sites}
    for module in modules:
        for name, parameter in module._parameters.items():
            if id(module) in projections or id(parameter) not in first:
                continue
            site, gate = first[id(parameter)]
            if not bool((gate == 1).all()):
                raise GateError(
                    f"the output projection of {site.name!r} shares its weights with {type(module).__name__}.{name}, so gates "
                    "cannot be folded into them; remove the heads (remove_heads_)"
                )


def _zero_(site: AttentionSite, gate: Tensor) -> None:
    """Close heads in a quantised weight, and check with the projection itself that its zeros are exact."""
    closed = (1 - gate).repeat_interleave(site.head_dim).to(site.output.weight.device, torch.get_default_dtype())
    columns = weight_by_output(site.output).detach()
    try:
        columns.mul_((1 - closed).to(columns))
        exact = torch.equal(site.output(closed[None]), site.output(0 * closed[None]))
    except Exception as error:  # quantised tensors lack operations in many ways
        raise GateError(f"{_describe(site)}, in which heads cannot be closed ({first_line(error)}); {FIRST}") from error
    if not exact:
        raise GateError(f"{_describe(site)}, whose zeros do not close a head; {FIRST}")


def _describe(site: AttentionSite) -> str:
    return f"the output projection of {site.name!r} holds {_kind(site.output)}"


def _kind(projection: Projection) -> str:
    """Return the kind of a weight, such as ``Parameter of int8``."""
    return f"{type(projection.weight).__name__} of {str(projection.weight.dtype).removeprefix('torch.')}"


Model = TypeVar("Model", bound=PreTrainedModel)


@torch.no_grad()
def remove_heads_(
    model: Model, mask: Tensor, *, values: Tensor | None = None, example: Mapping[str, Any] | None = None
) -> Model:
    """Remove the heads where ``mask`` is 0 physically, in place.

    The result has the outputs of the gated model in evaluation mode with gates ``mask * values``. One forward pass before and
    one after check this, on two short texts, one picture or one sound. A process checks each combination of class, config,
    dtypes and heads per site once. If the check fails, the model is restored; until then the old attention weights are kept
    in memory.

    Under grouped-query attention a key/value head stays while one of its query heads does. Where groups keep different
    numbers of query heads, key/value heads are repeated until all groups have one size, their greatest common divisor. This
    is exact, but can store more keys than the dense model; see the shapes in ``model.config.pruned_attention``. A site that
    keeps no head keeps its output projection's bias. Sites that shared weights get separate weights where heads were removed.

    Args:
        model: A Transformers model without attached gates, or your own module around one. Its weights must be plain
            floating-point numbers in memory: not offloaded, quantised, or spread over devices by tensor parallelism or FSDP.
        mask: The mask of 0 and 1, ``[heads]`` in site order.
        values: The gate values to fold into the output projection, ``[heads]``. Default: ones.
        example: The keyword arguments of a forward pass for the check. Default: random inputs.

    Returns:
        The same model. ``model.config.pruned_attention`` has the new shapes, and its ``save_pretrained`` also writes the
        modeling file that the weights load with.

    Raises:
        GateError: If gates are attached, adapters are not merged, mask or weights do not fit, no inputs for the check are
            found, or the outputs differ. Nothing changes then.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> _ = remove_heads_(model, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    >>> [site.heads for site in find_attention(model)]
    [3, 1]
    """
    check_merged(model)
    sites = find_attention(model)
    if (part := transformers_part(model, sites)) is not model:
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

    Args:
        model: A Transformers model without attached gates. Quantised weights can only take gates of 0 and 1.
        mask: The mask of 0 and 1, ``[heads]`` in site order.
        values: The gate values to multiply by the mask, ``[heads]``. Default: ones.

    Raises:
        GateError: If gates are attached, the mask does not fit, or the weights are quantised, offloaded or shared by sites
            with other gates. Nothing changes then.

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
    """Return the outermost Transformers model that contains all sites: the model itself or a part of it."""
    needed = {id(site.module) for site in sites}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and needed <= {id(module) for module in part.modules()}:
            return part
    raise GateError(
        f"the attention of {type(model).__name__} is not all in one Transformers model; gate its Transformers models one by one"
    )


def check_removable(sites: tuple[AttentionSite, ...]) -> None:
    """Raise an error unless heads can be removed from all these sites."""
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
                    f"{type(site.core).__name__} at {site.name!r} has the unknown parameter {name!r}; removing heads from such "
                    "attention is not implemented"
                )


def why_not_removable(sites: tuple[AttentionSite, ...]) -> str:
    """Return the error message of :func:`check_removable`; empty if heads can be removed."""
    try:
        check_removable(sites)
    except GateError as error:
        return str(error)
    return ""


def _checked(mask: Tensor, sites: tuple[AttentionSite, ...]) -> Tensor:
    if any(getattr(without_adapter(site.output), "_head_gates", False) for site in sites):
        raise GateError("gates are attached to this model; detach() them before removing heads")
    check_mask(mask, sum(site.heads for site in sites))
    return mask.detach().cpu()


def _checked_values(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise GateError(f"the gate values have shape {list(values.shape)}; expected one for each of {len(mask)} heads")
    if not bool(values.isfinite().all()):
        raise GateError(f"a gate value is {float(values[~values.isfinite()][0])}; expected finite numbers, 1 for an open head")
    return values.detach().cpu()


def _base_name(model: PreTrainedModel) -> str:
    """Return the prefix of the base model's modules, such as ``bert.``; empty for a base model itself."""
    return next((f"{name}." for name, module in model.named_modules() if name and module is model.base_model), "")


def _new_shapes(cuts: list[Cut], tables: dict[str, Tensor | None]) -> dict[str, dict[str, Any]]:
    """Return the new shape of each site that changes, by name; ``tables`` are from :func:`position_biases`."""
    any_cut = any(len(cut.queries) < cut.site.heads for cut in cuts)
    # Layers that shared one position bias each compute their own.
    changed = [cut for cut in cuts if len(cut.queries) < cut.site.heads or (any_cut and shares_bias(cut.site))]
    shapes = {cut.site.name: new_shape(cut) for cut in changed}
    for cut in changed:
        if cut.site.name in tables and cut.queries:
            table = tables[cut.site.name]
            shapes[cut.site.name]["own_bias"] = 0 if table is None else len(table)
    return shapes


def _cut_(model: PreTrainedModel, cut: Cut, gate: Tensor, table: Tensor | None, shape: dict[str, Any]) -> None:
    """Replace the weights of one site by the kept ones, without writing into existing tensors.

    Args:
        gate: The gates to fold into the output projection, ``[heads]``.
        table: The position biases ``[buckets, heads]`` of the site; None for none.
        shape: The new shape by the site's name below the base model, for :func:`reshape_`. Empty if the shape stays.
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
    """Fold gates ``[heads]`` into an output projection by giving it a new weight of the same shape."""
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
