"""A pruned model as a stock Transformers class: possible where every layer keeps the same number of heads.

Stock classes state one head count for all layers of a stack, so different counts per layer have no stock form.
(Transformers 5.23 knows ``per_layer_config``, but the attention of hardly any family reads it.) Whether a class can
hold the pruned weights is not looked up but tried: set its config, build it, load the weights, compare outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.export.reloaded import relative_difference
from gates.sites import AttentionSite, find_attention
from gates.surgery.labels import site_labels

STACK_FIELDS = {
    "encoder": ("encoder_attention_heads", "num_encoder_attention_heads"),
    "decoder": ("decoder_attention_heads", "num_decoder_attention_heads"),
    "cross": ("decoder_attention_heads", "num_decoder_attention_heads"),
}
"""Config fields that count the heads of one stack, by kind of site; families without them count all heads in one field."""
HEAD_FIELD = "num_attention_heads"  # n_head, n_heads, num_heads: configs map this name to their own
KEY_FIELDS = ("num_key_value_heads", "num_kv_heads")
WIDTH_FIELD = "head_dim"  # d_kv in T5

INSTEAD = "use the pruned form (remote code), which has no such limit"


def stock_model(
    cut: PreTrainedModel, dense: PreTrainedModel, inputs: Mapping[str, Tensor], *, tolerance: float
) -> PreTrainedModel:
    """The pruned model rebuilt as the stock class of the dense one, with a config of its own; neither is changed.

    Args:
        cut: model after :func:`gates.surgery.remove.remove_heads_`.
        dense: the model it was cut from, as it was before.
        inputs: inputs of a forward pass, to compare the rebuilt model with ``cut``.
        tolerance: largest difference, relative to the largest output.

    Raises:
        GateError: if the class cannot hold the weights or computes something else with them: layers keep different
            numbers of heads or none, its config refuses the count, it derives the head size from the hidden size
            (BERT, GPT-2, BART), or its layers share something that has an axis of heads (T5's position bias).
    """
    config, settings = _stock_config(cut, dense)
    named = f"{type(dense).__name__} with {settings}"
    try:
        config.validate()
        stock = type(dense)(config)
    except Exception as error:  # configs and models refuse in many ways
        raise GateError(f"{named} is refused by Transformers: {_last_line(error)}; {INSTEAD}") from error
    stock = torch.nn.Module.to(stock.eval(), cut.device, cut.dtype)
    weights = cut.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    for name, shape in shapes.items():
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != shape:
            raise GateError(
                f"{named} expects {name!r} of shape {shape}, but in the pruned model it is {found}, as where a class derives "
                f"the size of a head from the hidden size; {INSTEAD}"
            )
    stock.load_state_dict({name: weights[name] for name in shapes})
    difference = relative_difference(cut, stock, inputs)
    if not difference <= tolerance:
        left_out = next((name for name in weights if name not in shapes), None)
        reason = f"it has no place for {left_out!r}" if left_out else "its layers depend on the number of heads otherwise"
        raise GateError(f"{named} differs from the pruned model by {difference:.2g} (relative): {reason}; {INSTEAD}")
    if cut.can_generate():
        stock.generation_config = copy.deepcopy(cut.generation_config)
    return stock


def _stock_config(cut: PreTrainedModel, dense: PreTrainedModel) -> tuple[Any, str]:
    """The dense model's config with the pruned model's head counts, and what was set in it, as text."""
    config = copy.deepcopy(dense.config)
    left = {site.name: site for site in find_attention(cut)}
    values: dict[tuple[str, str], dict[str, int]] = {}
    sites = find_attention(dense)
    for site, label in zip(sites, site_labels(sites), strict=True):
        part = _part(dense, site)
        for field, value in _fields(getattr(config, part, config), site, left.get(site.name)).items():
            values.setdefault((part, field), {})[label] = value
    settings = []
    for (part, field), counts in values.items():
        low, high = (pick(counts.items(), key=lambda item: item[1]) for pick in (min, max))
        if low[1] != high[1]:
            raise GateError(
                f"{type(dense).__name__} has one {field} for all its layers, but this mask leaves {low[1]} in {low[0]} and "
                f"{high[1]} in {high[0]}; {INSTEAD}, or a mask with the same number in every layer"
            )
        with suppress(AttributeError):  # Falcon derives its head_dim; the weights' shapes tell whether that fits
            setattr(getattr(config, part, config), field, low[1])
            settings.append(f"{part}{'.' if part else ''}{field}={low[1]}")
    return config, ", ".join(settings)


def _fields(config: Any, site: AttentionSite, left: AttentionSite | None) -> dict[str, int]:
    """What a config has to say for one site; ``left`` is the site after pruning, None if no head stayed."""
    if left is None:
        raise GateError(f"no stock class has a layer without heads, but this mask leaves none in {site.label}; {INSTEAD}")
    heads = next((field for field in STACK_FIELDS[site.kind] if hasattr(config, field)), HEAD_FIELD)
    found = {heads: left.heads, WIDTH_FIELD: site.head_dim}
    keys = next((field for field in KEY_FIELDS if hasattr(config, field)), None)
    if keys is not None:
        found[keys] = left.kv_heads
    return found


def _part(model: PreTrainedModel, site: AttentionSite) -> str:
    """The name of the part of the model's config that a site was built from, such as ``text_config``; empty for all of it."""
    parts = {id(getattr(model.config, name, None)): name for name in getattr(model.config, "sub_configs", {})}
    names = site.name.split(".")
    owners = (model.get_submodule(".".join(names[:length])) for length in range(len(names), -1, -1))
    own = next(owner.config for owner in owners if hasattr(owner, "config"))
    return parts.get(id(own), "")


def _last_line(error: BaseException) -> str:
    """The reason, which configs state on the last line, without the kind of error."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")
