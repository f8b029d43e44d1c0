"""A batch as the heads of one kind of attention see it, and where their largest weights fall."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gates.roles.shares import sentence_weights


@dataclass(frozen=True)
class View:
    """The tokens that ask and those that are asked.

    Args:
        sentences: number of every example over the whole data, ``[batch]``; examples of one sentence are resampled together.
        queries: tokens whose attention counts, ``[batch, query]``: neither padding nor special tokens.
        keys: tokens that are no padding, ``[batch, key]``.
        text: those of them that are no special tokens, ``[batch, key]``.
        causal: whether queries see no later keys.
    """

    sentences: Tensor
    queries: Tensor
    keys: Tensor
    text: Tensor
    causal: bool = False

    @cached_property
    def visible(self) -> Tensor:
        """The keys of every query, ``[batch, query, key]``."""
        return visible_keys(self.queries.shape[1], self.keys, self.causal)

    @cached_property
    def weights(self) -> Tensor:
        """How often every example counts in each bootstrap replicate, ``[batch, 1 + replicates]``."""
        return sentence_weights(self.sentences)


def visible_keys(queries: int, keys: Tensor, causal: bool) -> Tensor:
    """Keys ``[batch, key]`` for every query, ``[batch, query, key]``: the earlier ones and itself under causal attention."""
    seen = keys.unsqueeze(1).expand(-1, queries, -1)
    return seen & torch.ones(queries, keys.shape[1], dtype=torch.bool, device=keys.device).tril() if causal else seen


def most_attended(weights: Tensor, among: Tensor) -> Tensor:
    """The key with the largest weight for every query, ``[batch, heads, query]``; -1 for queries without keys.

    Args:
        weights: of attention, ``[batch, heads, query, key]``.
        among: keys that may be chosen, ``[batch, query, key]``.
    """
    allowed = among.unsqueeze(1)
    chosen = weights.masked_fill(~allowed, -1.0).argmax(-1)
    return chosen.masked_fill(~allowed.any(-1), -1)


def at_offsets(among: Tensor, offsets: Tensor) -> Tensor:
    """The key at each fixed distance from every query, ``[batch, offsets, query]``; -1 where it is not among the keys.

    Args:
        among: keys that may be chosen, ``[batch, query, key]``.
        offsets: of the key from the query, in tokens, ``[offsets]``.
    """
    queries, keys = among.shape[1:]
    place = torch.arange(queries, device=among.device) + offsets.to(among.device).unsqueeze(1)
    inside = (place >= 0) & (place < keys)
    index = place.clamp(0, keys - 1)
    taken = among.gather(2, index.T.expand(len(among), -1, -1)).transpose(1, 2)
    return torch.where(inside & taken, place, -1)


def offsets_within(reach: int, *, zero: bool = True) -> Tensor:
    """Distances from ``-reach`` to ``reach``, with or without 0."""
    offsets = torch.arange(-reach, reach + 1)
    return offsets if zero else offsets[offsets != 0]


def is_among(chosen: Tensor, targets: Tensor) -> Tensor:
    """Whether chosen keys ``[batch, rows, query]`` are targets ``[batch, query, key]``; -1 is not."""
    found = targets.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1).gather(3, chosen.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found & (chosen >= 0)
