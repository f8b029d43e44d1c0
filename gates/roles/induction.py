"""Induction and duplicate-token heads (Olsson et al. 2022; Wang et al. 2022): in a random sequence that is said twice, the
largest weight falls on the token behind the earlier copy, or on that copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gates.roles.shares import Counts, SentenceShares
from gates.roles.view import View, at_offsets, is_among, most_attended
from gates.sites import AttentionSite

LENGTHS = (8, 32)
"""Tokens of a sequence before it is said again, from and up to: they vary, so that no fixed offset finds the copy."""


def repeated_sequences(
    tokens: Sequence[int], rows: int, *, start: int | None = None, longest: int = LENGTHS[1], seed: int = 0
) -> list[list[int]]:
    """Random sequences of distinct tokens, each said twice.

    Args:
        tokens: that may be drawn.
        rows: how many sequences.
        start: token in front of each; None for none.
        longest: the most tokens of a sequence.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.tensor(list(tokens))
    longest = max(2, min(LENGTHS[1], longest, len(pool)))
    found = []
    for _ in range(rows):
        length = int(torch.randint(min(LENGTHS[0], longest), longest + 1, (), generator=generator))
        drawn = pool[torch.randperm(len(pool), generator=generator)[:length]].tolist()
        found.append([*([] if start is None else [start]), *drawn, *drawn])
    return found


def earlier_copies(ids: Tensor, text: Tensor) -> Tensor:
    """Where the same token stood last before, ``[batch, token]``; -1 where it did not, and for tokens that are no text.

    Args:
        ids: tokens, ``[batch, token]``.
        text: tokens that are neither padding nor special, ``[batch, token]``.
    """
    same = (ids.unsqueeze(1) == ids.unsqueeze(2)) & text.unsqueeze(1) & text.unsqueeze(2)
    before = same & torch.ones_like(same).tril(-1)
    place = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(before, place, -1).amax(-1)


@torch.no_grad()
def copy_counts(weights: Tensor, view: View, earlier: Tensor, offsets: Tensor) -> Counts:
    """How often the largest weight, without special tokens, is on the token behind the earlier copy, and on the copy.

    Baselines: any token alike, then the token at each of ``offsets``.

    Args:
        weights: of attention, ``[batch, heads, token, token]``.
        view: of the batch.
        earlier: places of the copies, ``[batch, token]``; -1 for none.
        offsets: of the baselines.
    """
    among = view.visible & view.text.unsqueeze(1)
    counted = view.queries & (earlier >= 0)
    chosen, fixed = most_attended(weights, among), at_offsets(among, offsets)
    keys = torch.arange(weights.shape[3], device=weights.device)
    hits, baselines = [], []
    for shift in (1, 0):
        targets = (keys == (earlier + shift).unsqueeze(-1)) & counted.unsqueeze(-1)
        uniform = (counted / among.sum(-1).clamp(min=1)).sum(-1, keepdim=True)
        hits.append(is_among(chosen, targets).sum(-1))
        baselines.append(torch.cat([uniform, is_among(fixed, targets).sum(-1)], dim=1))
    return Counts(torch.stack(hits, -1), counted.sum(-1, keepdim=True).expand(-1, 2), torch.stack(baselines, -1))


class CopyShares(SentenceShares):
    """:func:`copy_counts` over the data.

    Args:
        sites: attention modules of the model.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    names = ["induction", "duplicate"]

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        self.offsets = torch.arange(-LENGTHS[1], 1)
        super().__init__(sites, columns=len(self.names), baselines=1 + len(self.offsets), **kwargs)

    @property
    def baseline_names(self) -> list[str]:
        return ["any token", *(f"offset {offset:+d}" for offset in self.offsets.tolist())]

    def observe(self, site: int, weights: Tensor, view: View, earlier: Tensor) -> None:
        """Add the attention ``[batch, heads, token, token]`` of one site."""
        self.update(site, copy_counts(weights, view, earlier, self.offsets), view.weights)
