"""Heads of zeros that make all layers of a stack equally large, so that a stock class can hold a pruned model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.budget import check_mask
from gates.errors import GateError
from gates.export.stock import INSTEAD, config_of, stacks
from gates.sites import AttentionSite, find_attention

Extent = tuple[int, int]
"""Groups of a site, and query heads of each group."""


def pad_heads(model: PreTrainedModel, mask: Tensor) -> Tensor:
    """A mask with the fewest further heads that make all layers of a stack equally large, in numbers that the config takes.

    The further heads are removed ones. With gates of ``mask`` folded into the output projection they are heads of zeros, and
    the model computes what it does without them. Groups of query heads stay whole: all get as many query heads as the largest,
    and all layers as many groups as the one with most.

    Args:
        model: dense Transformers model.
        mask: 0/1 per head, ``[heads]``.

    Raises:
        GateError: if the mask is of another model, no numbers up to the dense ones are equal in all layers and allowed by the
            config, or layers differ in their numbers of heads already.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    >>> model = LlamaModel(LlamaConfig(vocab_size=50, **size))
    >>> pad_heads(model, torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1])).tolist()
    [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
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
        sites: of a dense model.
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
