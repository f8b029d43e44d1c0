"""Positional heads: the largest weight falls on one relative position (Voita et al. 2019, section 5.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gates.roles.shares import Counts, SentenceShares
from gates.roles.view import View, at_offsets, most_attended, offsets_within
from gates.sites import AttentionSite

REACH = 10
"""Relative positions that are told apart, in tokens."""


@torch.no_grad()
def positional_counts(weights: Tensor, view: View, offsets: Tensor) -> Counts:
    """How often the largest weight, special tokens included, is at each offset; queries that see one key do not count.

    The one baseline has its largest weight on any visible key alike.

    Args:
        weights: of attention, ``[batch, heads, query, key]``.
        view: of the batch.
        offsets: of the key from the query, ``[columns]``.
    """
    visible = view.visible
    counted = view.queries & (visible.sum(-1) > 1)
    place = torch.arange(weights.shape[2], device=weights.device)
    relative = most_attended(weights, visible) - place
    hits = (relative.unsqueeze(-1) == offsets.to(weights.device)) & counted[:, None, :, None]
    there = (at_offsets(visible, offsets) >= 0).transpose(1, 2) & counted.unsqueeze(-1)
    uniform = (there / visible.sum(-1, keepdim=True).clamp(min=1)).sum(1, keepdim=True)
    return Counts(hits.sum(2), counted.sum(-1, keepdim=True).expand(-1, len(offsets)), uniform)


class PositionalShares(SentenceShares):
    """:func:`positional_counts` over the data; a column for each of ``offsets``.

    Args:
        sites: attention modules of the model.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        self.offsets = offsets_within(REACH)
        super().__init__(sites, columns=len(self.offsets), baselines=1, **kwargs)

    @property
    def names(self) -> list[str]:
        return [f"{offset:+d}" for offset in self.offsets.tolist()]

    def observe(self, site: int, weights: Tensor, view: View) -> None:
        """Add the attention ``[batch, heads, query, key]`` of one site."""
        self.update(site, positional_counts(weights, view, self.offsets), view.weights)
