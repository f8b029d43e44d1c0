"""Rebuild a pruned model as a stock Transformers class, which usually needs the same number of heads in every layer.

Most stock classes have one head count for all layers of a stack. Some have a count for each layer: in a list next to the field
(Laguna), or in Transformers' ``per_layer_config`` (the key/value heads of Gemma 4). A trial shows whether a class can hold the
pruned weights: set its config, build it, load the weights, and compare outputs.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.attention.sites import AttentionSite, find_attention, site_labels
from gates.errors import GateError
from gates.gating.budget import check_mask
from gates.gating.latency import LatencyTable
from gates.surgery.slices import cut_site
from gates.surgery.verify import relative_difference

STACK_FIELDS = {
    "encoder": ("encoder_attention_heads", "num_encoder_attention_heads"),
    "decoder": ("decoder_attention_heads", "num_decoder_attention_heads"),
    "cross": ("decoder_attention_heads", "num_decoder_attention_heads"),
}
"""The config fields with the head count of one stack, by kind of site. Families without them have one field for all stacks."""
HEAD_FIELD = "num_attention_heads"  # n_head, n_heads, num_heads: configs map this name to their own
KEY_FIELDS = ("num_key_value_heads", "num_kv_heads")

INSTEAD = "use the form 'pruned', which loads with trust_remote_code=True or after gates.register()"
EVEN = "a mask with the same number in every layer, or pad_heads (--pad_heads)"


def stock_model(
    cut: PreTrainedModel, dense: PreTrainedModel, mask: Tensor, inputs: Mapping[str, Tensor], *, tolerance: float
) -> PreTrainedModel:
    """Return the pruned model rebuilt as the stock class of the dense one, with a new config; neither is changed.

    Args:
        cut: The model after :func:`gates.surgery.remove.remove_heads_`.
        mask: The mask of 0 and 1, ``[heads]``, by which ``cut`` was cut.
        inputs: The inputs of a forward pass, to compare the result with ``cut``.
        tolerance: The largest difference, relative to the largest output.

    Raises:
        GateError: If the class cannot hold the weights or has other outputs. Reasons are layers of different sizes or without
            heads, a head size from the hidden size (BERT, GPT-2, BART), and a shared position bias (T5).
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
            raise GateError(f"{named} expects {name!r} of shape {shape}, but the pruned model has {found}; {INSTEAD}")
    stock.load_state_dict({name: weights[name] for name in shapes})
    difference = relative_difference(cut, stock, inputs)
    if not difference <= tolerance:
        left_out = next((name for name in weights if name not in shapes), None)
        reason = f": it lacks {left_out!r}" if left_out else ""
        raise GateError(f"{named} differs from the pruned model by {difference:.2g} (relative){reason}; {INSTEAD}")
    if cut.can_generate():
        stock.generation_config = copy.deepcopy(cut.generation_config)
    return stock


def check_head_size(dense: PreTrainedModel) -> None:
    """Raise :class:`GateError` for a class that derives the head size from the hidden size (BERT, GPT-2, BART): no mask fits.

    The class is built without weights and with one group of heads per layer. A class that refuses this number passes, because
    it may accept another one.
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
            f"heads; {INSTEAD}"
        )


@dataclass(frozen=True)
class StockConfig:
    """Hold a stock config for a pruned model."""

    config: Any  # The dense model's config with the head counts of the pruned model
    settings: str  # The changed fields, as text
    uneven: str  # The first field that needs one number per layer, as text. Empty if there is none.


def config_of(dense: PreTrainedModel, mask: Tensor) -> StockConfig:
    """Return the config with the numbers of kept heads, by layer where they differ."""
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
    """Turn the many errors of configs and models into one :class:`GateError`."""
    try:
        yield
    except Exception as error:
        if stated.uneven:
            why = "" if isinstance(error, RuntimeError) else f" ({_last_line(error)})"
            raise GateError(f"{type(dense).__name__} has {stated.uneven}{why}; {INSTEAD}, or {EVEN}") from error
        settings = f"{type(dense).__name__} with {stated.settings}"
        raise GateError(f"{settings} is refused by Transformers: {_last_line(error)}; {INSTEAD}") from error


def _by_layer_(config: Any, field: str, counts: Mapping[int, int], *, only_known: bool = False) -> bool:
    """Set a number for each layer if the config supports it (``only_known``: already has it), and return whether it was set."""
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
    """Return the config fields of one site that keeps the heads ``keep``, a mask ``[heads]``."""
    left = cut_site(site, keep)
    if not left.queries:
        raise GateError(f"no stock class has a layer without heads, but this mask leaves none in {site.label}; {INSTEAD}")
    found = {_head_field(config, site): len(left.queries), "head_dim": site.head_dim}  # d_kv in T5
    keys = next((field for field in KEY_FIELDS if _states(config, field)), None)
    if keys is not None:
        found[keys] = len(left.keys)
    return found


def _head_field(config: Any, site: AttentionSite) -> str:
    return next((field for field in STACK_FIELDS[site.kind] if _states(config, field)), HEAD_FIELD)


def _states(config: Any, field: str) -> bool:
    """Return whether a config has a field, including one that differs by layer and cannot be read as one value."""
    return field in _known_by_layer(config) or hasattr(config, field)


def _known_by_layer(config: Any) -> Collection[str]:
    """Return the fields with a number for each layer."""
    return getattr(config, "per_layer_attributes", None) or ()


def stacks(dense: PreTrainedModel) -> list[tuple[str, str]]:
    """Return for every site the part of the config and the field with its number of heads. Sites with the same field need the
    same number of heads in a stock class."""
    parts = [(_part(dense, site), site) for site in find_attention(dense)]
    return [(part, _head_field(getattr(dense.config, part, dense.config), site)) for part, site in parts]


def _part(model: PreTrainedModel, site: AttentionSite) -> str:
    """Return the name of the nested config that a site was built from, such as ``text_config``; empty for the whole config."""
    parts = {id(getattr(model.config, name, None)): name for name in getattr(model.config, "sub_configs", {})}
    names = site.name.split(".")
    owners = (model.get_submodule(".".join(names[:length])) for length in range(len(names), -1, -1))
    own = next(owner.config for owner in owners if hasattr(owner, "config"))
    return parts.get(id(own), "")


def _last_line(error: BaseException) -> str:
    """Return the last line of an error, where configs state the reason, without the kind of error."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")


Extent = tuple[int, int]
"""The number of groups of a site, and of query heads in each group."""


def pad_heads(model: PreTrainedModel, mask: Tensor, table: LatencyTable | None = None) -> Tensor:
    """Return a mask with the fewest additional heads that make all layers of a stack equally large and fit the config.

    The additional heads are removed ones. Folding the gates of ``mask`` into the output projection makes them heads of zeros,
    which change no output. Each group gets as many query heads as the largest one, and each layer as many groups as the layer
    with most.

    Args:
        mask: The mask of 0 and 1, ``[heads]``.
        table: The measured times of the model, to choose the fastest equal numbers; None for those with the fewest heads.

    Raises:
        GateError: For a table of another model, or layers of the dense model that differ in their numbers of heads. Also if no
            equal numbers fit the config.
    """
    sites, names = find_attention(model), stacks(model)
    check_mask(mask, sum(site.heads for site in sites))
    refused: GateError | None = None
    candidates = _candidates(sites, mask, names)
    for extents in candidates if table is None else _fastest_first(candidates, sites, names, table):
        padded = _padded_mask(sites, mask, [extents[name] for name in names])
        try:
            config_of(model, padded)
        except GateError as error:
            refused = refused or error
        else:
            return padded
    raise refused or GateError(f"the layers of {type(model).__name__} differ in their numbers of heads; {INSTEAD}")


def _padded_mask(sites: Sequence[AttentionSite], mask: Tensor, extents: Sequence[Extent]) -> Tensor:
    """Add heads to a mask until every site has the groups, and the heads of each group, of its extent. Groups and heads that
    the mask keeps come first, then others in order."""
    parts = []
    for site, keep, (groups, size) in zip(sites, mask.split([site.heads for site in sites]), extents, strict=True):
        kept = keep.view(site.kv_heads, -1)
        in_order = kept.argsort(dim=1, descending=True, stable=True)[:, :size]
        chosen = kept.amax(1).argsort(descending=True, stable=True)[:groups]
        padded = torch.zeros_like(kept)
        padded[chosen.unsqueeze(1), in_order[chosen]] = 1.0
        parts.append(padded.flatten())
    return torch.cat(parts)


def _fastest_first(
    candidates: Iterable[Mapping[Hashable, Extent]],
    sites: Sequence[AttentionSite],
    names: Sequence[Hashable],
    table: LatencyTable,
) -> list[Mapping[Hashable, Extent]]:
    """Sort extents by their measured time. Where it is within 1 % of the least one, those with the fewest heads stay first."""
    sizes = [site.heads if table.unit == "head" else site.kv_heads for site in sites]
    table.check_fits(dict(zip(site_labels(sites), sizes, strict=True)), table.unit)

    def time_of(extents: Mapping[Hashable, Extent]) -> float:
        pairs = zip(table.sites, (extents[name] for name in names), strict=True)
        return sum(site.times[math.prod(extent) if table.unit == "head" else extent[0]] for site, extent in pairs)

    times = [(time_of(extents), extents) for extents in candidates]
    noise = min((time for time, _ in times), default=0.0) + 0.01 * sum(site.milliseconds[-1] for site in table.sites)
    return [extents for _, extents in sorted(times, key=lambda pair: max(pair[0], noise))]


def _candidates(sites: Sequence[AttentionSite], mask: Tensor, names: Sequence[Hashable]) -> Iterator[Mapping[Hashable, Extent]]:
    """Yield extents for every stack, those with the fewest heads first."""
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
