"""Rare-token heads: the largest weight falls on the rarest tokens of the sentence (Voita et al. 2019, section 5.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gates.roles.positional import REACH
from gates.roles.shares import Counts, SentenceShares
from gates.roles.view import View, at_offsets, is_among, most_attended, offsets_within
from gates.sites import AttentionSite

COMMON = 500
"""A sentence counts if its rarest token is not among so many of the most frequent ones."""


def token_counts(counts: Tensor, common: int = COMMON) -> tuple[Tensor, Tensor]:
    """Frequencies and whether a token is among the most frequent ones.

    Args:
        counts: of every token of the vocabulary in training data, ``[vocabulary]``.
        common: how many tokens are called frequent.
    """
    frequent = torch.zeros(len(counts), dtype=torch.bool)
    frequent[counts.argsort(descending=True, stable=True)[:common]] = True
    return counts, frequent & (counts > 0)


@torch.no_grad()
def rare_counts(weights: Tensor, view: View, frequency: Tensor, common: Tensor, offsets: Tensor) -> Counts:
    """How often the largest weight, without special tokens, is on the rarest and on one of the two rarest tokens a query sees.

    Tokens of equal frequency are equally rare. Baselines: any token alike, then the token at each of ``offsets``.

    Args:
        weights: of attention, ``[batch, heads, query, key]``.
        view: of the batch.
        frequency: of the keys in training data, ``[batch, key]``.
        common: keys that are frequent tokens, ``[batch, key]``.
        offsets: of the baselines.
    """
    among = view.visible & view.text.unsqueeze(1)
    frequency = frequency.double().unsqueeze(1).expand_as(among)
    rarest = among & (frequency == _smallest(frequency, among))
    rest = among & ~rarest
    second = rest & (frequency == _smallest(frequency, rest)) & (rarest.sum(-1, keepdim=True) < 2)
    counted = view.queries & (among.sum(-1) > 2) & ~(rarest & common.unsqueeze(1)).any(-1)
    chosen, fixed = most_attended(weights, among), at_offsets(among, offsets)
    hits, baselines = [], []
    for targets in (rarest, rarest | second):
        uniform = targets.sum(-1) / among.sum(-1).clamp(min=1)
        hits.append((is_among(chosen, targets) & counted.unsqueeze(1)).sum(-1))
        at_fixed = (is_among(fixed, targets) & counted.unsqueeze(1)).sum(-1)
        baselines.append(torch.cat([(uniform * counted).sum(-1, keepdim=True), at_fixed], dim=1))
    chances = counted.sum(-1, keepdim=True).expand(-1, 2)
    return Counts(torch.stack(hits, -1), chances, torch.stack(baselines, -1))


def _smallest(values: Tensor, among: Tensor) -> Tensor:
    """The smallest value among the keys of each query, ``[batch, query, 1]``."""
    return values.masked_fill(~among, torch.inf).amin(-1, keepdim=True)


class RareTokenShares(SentenceShares):
    """:func:`rare_counts` over the data.

    Args:
        sites: attention modules of the model.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    names = ["rarest", "two rarest"]

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        self.offsets = offsets_within(REACH)
        super().__init__(sites, columns=len(self.names), baselines=1 + len(self.offsets), **kwargs)

    @property
    def baseline_names(self) -> list[str]:
        return ["any token", *(f"offset {offset:+d}" for offset in self.offsets.tolist())]

    def observe(self, site: int, weights: Tensor, view: View, frequency: Tensor, common: Tensor) -> None:
        """Add the attention ``[batch, heads, query, key]`` of one site; see :func:`rare_counts`."""
        self.update(site, rare_counts(weights, view, frequency, common, self.offsets), view.weights)
