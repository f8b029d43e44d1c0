"""Remove attention heads for good: fewer rows in query, key and value, fewer columns in the output projection."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gates.errors import GateError
from gates.sites import AttentionSite, find_attention, weight_by_output
from gates.surgery.adapters import check_merged
from gates.surgery.modeling_file import save_pruned_shape
from gates.surgery.pruned import reshape_
from gates.surgery.slices import (
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

Model = TypeVar("Model", bound=PreTrainedModel)


@torch.no_grad()
def remove_heads_(model: Model, mask: Tensor, *, values: Tensor | None = None) -> Model:
    """Physically remove the heads where ``mask`` is 0, in place.

    The result computes what the gated model computes in evaluation mode with gates ``mask * values``. Under
    grouped-query attention a key/value head stays while one of its query heads does; where the groups keep
    different numbers of query heads, key/value heads are repeated so that all groups are again of one size (their
    greatest common divisor), which is exact but can store more keys than the dense model did: see the shapes in
    ``model.config.pruned_attention``. A site that keeps no head keeps its output projection's bias.

    Args:
        model: Transformers model without attached gates.
        mask: 0/1 per head, ``[heads]`` in site order.
        values: gate values to fold into the output projection, ``[heads]``; ones by default.

    Returns:
        The same model. ``model.config.pruned_attention`` says what was done, and its ``save_pretrained`` writes the modeling
        file that the weights load with.

    Raises:
        GateError: if gates are attached, adapters are not merged, or the mask is of another model.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> _ = remove_heads_(model, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    >>> [site.heads for site in find_attention(model)]
    [3, 1]
    """
    check_merged(model)
    sites = find_attention(model)
    check_removable(sites)
    mask = _checked(mask, sites)
    sizes = [site.heads for site in sites]
    values = torch.ones_like(mask) if values is None else _checked_values(values, mask)
    cuts = [cut_site(site, keep) for site, keep in zip(sites, mask.split(sizes), strict=True)]
    projections = [sliced_projections(cut, gate) for cut, gate in zip(cuts, values.split(sizes), strict=True)]
    per_head = [sliced_per_head(cut) for cut in cuts]
    changed = [len(cut.queries) < cut.site.heads for cut in cuts]
    if any(changed) and any(shares_bias(cut.site) for cut in cuts):
        changed = [True] * len(cuts)  # biases are passed on from layer to layer, so now every layer computes its own
    shapes = {cut.site.name: new_shape(cut) for cut, has_changed in zip(cuts, changed, strict=True) if has_changed}
    tables = position_biases(sites)
    for cut, tensors in zip(cuts, per_head, strict=True):
        if cut.site.name in tables and cut.queries and cut.site.name in shapes:
            table = tables[cut.site.name]
            shapes[cut.site.name]["own_bias"] = 0 if table is None else len(table)
            if table is not None:
                tensors["relative_attention_bias.weight"] = table[:, cut.queries].clone()

    base_name = _base_name(model)
    shapes = {name.removeprefix(base_name): shape for name, shape in shapes.items()}
    before = getattr(model.config, "pruned_attention", {})
    reshape_(model, shapes)
    model.config.pruned_attention = {**before, **shapes}
    model.save_pretrained = partial(save_pruned_shape, model)  # type: ignore[method-assign]
    for cut, weights, tensors, has_changed in zip(cuts, projections, per_head, changed, strict=True):
        for path, (weight, bias) in weights.items():
            _fill_(_projection_after(model, cut, path), weight, bias)
        if has_changed and cut.queries:
            for path, tensor in tensors.items():
                owner, _, name = f"{cut.site.name}.{path}".rpartition(".")
                getattr(model.get_submodule(owner), name).copy_(tensor)
    return model


@torch.no_grad()
def zero_heads_(model: Model, mask: Tensor, *, values: Tensor | None = None) -> Model:
    """Fold gates ``mask * values`` into the output projections and keep the dense shape (the *masked* form).

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    >>> _ = zero_heads_(model, torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1]))
    >>> float(find_attention(model)[0].output.weight[:, 8:16].abs().sum().detach())  # the columns of head 1
    0.0
    """
    check_merged(model)
    sites = find_attention(model)
    mask = _checked(mask, sites)
    gates = mask if values is None else mask * _checked_values(values, mask)
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
        known = {path for path, _ in input_projections(site)} | {part.path for part in per_head_parts(site)}
        known |= {site.layout.output, site.layout.adds, "relative_attention_bias"}
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


def _checked_values(values: Tensor, mask: Tensor) -> Tensor:
    if values.shape != mask.shape:
        raise GateError(f"the gate values have shape {list(values.shape)}; expected one for each of {len(mask)} heads")
    return values.detach().cpu()


def _base_name(model: PreTrainedModel) -> str:
    """Prefix of the base model's modules, such as ``bert.`` (empty for a base model itself)."""
    return next((f"{name}." for name, module in model.named_modules() if name and module is model.base_model), "")


def _projection_after(model: nn.Module, cut: Cut, path: str) -> nn.Module | None:
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
