"""A pruned model as a stock Transformers class: possible where every layer keeps the same number of heads.

Most stock classes state one head count for all layers of a stack, so different counts per layer have no stock form there. Some
read a count for each layer: from a list beside the field (Laguna), or from Transformers' ``per_layer_config`` (the key/value
heads of Gemma 4). Whether a class can hold the pruned weights is not looked up but tried: set its config, build it, load the
weights, compare outputs.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.sites import AttentionSite, find_attention, site_labels
from gates.errors import GateError
from gates.gating.budget import check_mask
from gates.surgery.slices import cut_site
from gates.surgery.verify import relative_difference

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
EVEN = "a mask with the same number in every layer, or layers padded to it (pad_heads, --pad_heads)"


def stock_model(
    cut: PreTrainedModel, dense: PreTrainedModel, mask: Tensor, inputs: Mapping[str, Tensor], *, tolerance: float
) -> PreTrainedModel:
    """The pruned model rebuilt as the stock class of the dense one, with a config of its own; neither is changed.

    Args:
        cut: model after :func:`gates.surgery.remove.remove_heads_`.
        dense: the model it was cut from, as it was before.
        mask: 0/1 per head, ``[heads]``, by which it was cut.
        inputs: inputs of a forward pass, to compare the rebuilt model with ``cut``.
        tolerance: largest difference, relative to the largest output.

    Raises:
        GateError: if the class cannot hold the weights or computes something else with them: layers keep different
            numbers of heads or none, its config refuses the count, it derives the head size from the hidden size
            (BERT, GPT-2, BART), or its layers share something that has an axis of heads (T5's position bias).
    """
    if not bool(mask.all()):
        check_head_size(dense)
    stated = config_of(dense, mask)
    named = f"{type(dense).__name__} with {stated.settings}"
    with _refused_in_one_sentence(dense, stated):
        stock = type(dense)(stated.config)
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


def check_head_size(dense: PreTrainedModel) -> None:
    """Raises :class:`GateError` for a class that derives the size of a head from the hidden size (BERT, GPT-2, BART), so that
    no mask fits it.

    The class is built with one group of heads in each layer, without weights. A class that refuses this number may still take
    another one, so it passes.
    """
    sites = find_attention(dense)
    first = [torch.arange(site.heads) < site.heads // site.kv_heads for site in sites]
    try:
        with torch.device("meta"):
            smaller = find_attention(type(dense)(config_of(dense, torch.cat(first).float()).config))
    except Exception:  # configs and models refuse in many ways
        return
    if any(left.head_dim != site.head_dim for left, site in zip(smaller, sites, strict=False)):
        raise GateError(
            f"{type(dense).__name__} derives the size of a head from the hidden size, so it has no stock form with fewer "
            f"heads, whatever the mask; {INSTEAD}"
        )


@dataclass(frozen=True)
class StockConfig:
    """A stock config for a pruned model.

    Args:
        config: the dense model's, with the head counts of the pruned one.
        settings: what was set in it, as text.
        uneven: the first field that states one number for each layer where the dense model's states one for all, as text;
            empty if there is none.
    """

    config: Any
    settings: str
    uneven: str


def config_of(dense: PreTrainedModel, mask: Tensor) -> StockConfig:
    """Return the config that states the heads which stay, by layer where they differ; no model is built with it."""
    config = copy.deepcopy(dense.config)
    sites = find_attention(dense)
    fields: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}
    for site, keep, label in zip(sites, mask.cpu().split([site.heads for site in sites]), site_labels(sites), strict=True):
        part = _part(dense, site)
        for field, value in _fields(getattr(config, part, config), site, keep).items():
            fields.setdefault((part, field), {})[label] = (site.layer, value)
    settings, uneven = [], ""
    for (part, field), counts in fields.items():
        own = getattr(config, part, config)
        (low, (_, least)), (high, (_, most)) = (pick(counts.items(), key=lambda item: item[1][1]) for pick in (min, max))
        by_layer, were_known = dict(counts.values()), field in _known_by_layer(own)
        several = f"one {field} for all its layers, but this mask leaves {least} in {low} and {most} in {high}"
        is_one_each = all(by_layer[layer] == count for layer, count in counts.values())  # not another in cross-attention
        if least != most and not (is_one_each and _by_layer_(own, field, by_layer)):
            raise GateError(f"{type(dense).__name__} has {several}; {INSTEAD}, or {EVEN}")
        uneven = uneven or (several if least != most and not were_known else "")
        with suppress(AttributeError):  # Falcon derives its head_dim; the weights' shapes tell whether that fits
            if least == most and not _by_layer_(own, field, by_layer, only_known=True):
                setattr(own, field, most)
            settings.append(f"{part}{'.' if part else ''}{field}={most if least == most else list(by_layer.values())}")
    stated = StockConfig(config, ", ".join(settings), uneven)
    with _refused_in_one_sentence(dense, stated):
        config.validate()
    return stated


@contextmanager
def _refused_in_one_sentence(dense: PreTrainedModel, stated: StockConfig) -> Iterator[None]:
    """Configs and models refuse in many ways what a config states."""
    try:
        yield
    except Exception as error:
        if stated.uneven:
            why = "" if isinstance(error, RuntimeError) else f" ({_last_line(error)})"  # it reads one number for all
            raise GateError(f"{type(dense).__name__} has {stated.uneven}{why}; {INSTEAD}, or {EVEN}") from error
        settings = f"{type(dense).__name__} with {stated.settings}"
        raise GateError(f"{settings} is refused by Transformers: {_last_line(error)}; {INSTEAD}") from error


def _by_layer_(config: Any, field: str, counts: Mapping[int, int], *, only_known: bool = False) -> bool:
    """State a number for each layer in a config that can have them, or only in one that has them; return whether."""
    listed = getattr(config, f"{field}_per_layer", None)
    if isinstance(listed, list):
        setattr(config, f"{field}_per_layer", [counts.get(layer, count) for layer, count in enumerate(listed)])
        return True
    if not hasattr(type(config), "per_layer_config") or (only_known and field not in _known_by_layer(config)):
        return False
    known = {int(layer): values for layer, values in config.to_dict().get("per_layer_config", {}).items()}
    for layer, count in counts.items():
        known[layer] = {**known.get(layer, {}), field: count}
    config.per_layer_config = known
    return True


def _fields(config: Any, site: AttentionSite, keep: Tensor) -> dict[str, int]:
    """What a config has to say for one site of which the heads ``keep`` stay, 0/1 ``[heads]``."""
    left = cut_site(site, keep)
    if not left.queries:
        raise GateError(f"no stock class has a layer without heads, but this mask leaves none in {site.label}; {INSTEAD}")
    found = {_head_field(config, site): len(left.queries), WIDTH_FIELD: site.head_dim}
    keys = next((field for field in KEY_FIELDS if _states(config, field)), None)
    if keys is not None:
        found[keys] = len(left.keys)
    return found


def _head_field(config: Any, site: AttentionSite) -> str:
    return next((field for field in STACK_FIELDS[site.kind] if _states(config, field)), HEAD_FIELD)


def _states(config: Any, field: str) -> bool:
    """Whether a config has a field; one that differs by layer cannot be read from it as a whole."""
    return field in _known_by_layer(config) or hasattr(config, field)


def _known_by_layer(config: Any) -> Collection[str]:
    """The fields of which a config states a number for each layer."""
    return getattr(config, "per_layer_attributes", None) or ()


def stacks(dense: PreTrainedModel) -> list[tuple[str, str]]:
    """For every site of a model what states its number of heads: the part of the config and the field. Sites with the same one
    need equally many heads in a stock class."""
    parts = [(_part(dense, site), site) for site in find_attention(dense)]
    return [(part, _head_field(getattr(dense.config, part, dense.config), site)) for part, site in parts]


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


# Heads of zeros that make all layers of a stack equally large, so that a stock class can hold a pruned model.

Extent = tuple[int, int]
"""Groups of a site, and query heads of each group."""


def pad_heads(model: PreTrainedModel, mask: Tensor) -> Tensor:
    """A mask with the fewest further heads that make all layers of a stack equally large, in numbers that the config takes.

    The further heads are removed ones. With gates of ``mask`` folded into the output projection they are heads of zeros, and
    the model computes what it does without them. Groups of query heads stay whole: all get as many query heads as the largest,
    and all layers as many groups as the one with most.

    Args:
        mask: 0/1 per head, ``[heads]``.

    Raises:
        GateError: if the mask is of another model, no numbers up to the dense ones are equal in all layers and allowed by the
            config, or layers differ in their numbers of heads already.
    """
    sites, names = find_attention(model), stacks(model)
    check_mask(mask, sum(site.heads for site in sites))
    refused: GateError | None = None
    for extents in _candidates(sites, mask, names):
        padded = padded_mask(sites, mask, [extents[name] for name in names])
        try:
            config_of(model, padded)
        except GateError as error:
            refused = refused or error
        else:
            return padded
    raise refused or GateError(f"the layers of {type(model).__name__} differ in their numbers of heads; {INSTEAD}")


def padded_mask(sites: Sequence[AttentionSite], mask: Tensor, extents: Sequence[Extent]) -> Tensor:
    """The mask with further heads, so that every site keeps as many groups and as many heads of each as its extent says.

    A site's groups with kept heads come first, and their kept heads, then others in their order.

    Args:
        mask: 0/1 per head, ``[heads]``.
        extents: groups and heads of each group, for every site; no fewer than it keeps, no more than it has.
    """
    parts = []
    for site, keep, (groups, size) in zip(sites, mask.split([site.heads for site in sites]), extents, strict=True):
        kept = keep.view(site.kv_heads, -1)
        in_order = kept.argsort(dim=1, descending=True, stable=True)[:, :size]
        chosen = kept.amax(1).argsort(descending=True, stable=True)[:groups]
        padded = torch.zeros_like(kept)
        padded[chosen.unsqueeze(1), in_order[chosen]] = 1.0
        parts.append(padded.flatten())
    return torch.cat(parts)


def _candidates(sites: Sequence[AttentionSite], mask: Tensor, names: Sequence[Hashable]) -> Iterator[Mapping[Hashable, Extent]]:
    """Extents for every stack, those with the fewest heads of all sites first."""
    parts = mask.split([site.heads for site in sites])
    ranges: dict[Hashable, list[Extent]] = {}
    for name in dict.fromkeys(names):
        own = [(site, keep.view(site.kv_heads, -1)) for site, keep, of in zip(sites, parts, names, strict=True) if of == name]
        least = [
            max(1, max(int(kept.amax(1).sum()) for _, kept in own)),
            max(1, max(int(kept.sum(1).max()) for _, kept in own)),
        ]
        most = [min(site.kv_heads for site, _ in own), min(site.heads // site.kv_heads for site, _ in own)]
        groups, heads = (range(low, high + 1) for low, high in zip(least, most, strict=True))
        ranges[name] = list(itertools.product(groups, heads))
    found = [dict(zip(ranges, extents, strict=True)) for extents in itertools.product(*ranges.values())]
    yield from sorted(found, key=lambda extents: [sum(math.prod(extents[name]) for name in names), *extents.values()])
