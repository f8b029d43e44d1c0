"""Syntactic heads: the largest weight falls on a word's head or dependent in a gold tree (Voita et al. 2019, section 5.2;
Clark et al. 2019, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gates.roles.positional import REACH
from gates.roles.shares import Counts, SentenceShares
from gates.roles.view import View, at_offsets, most_attended, offsets_within
from gates.roles.words import other_words, word_attention
from gates.sites import AttentionSite

DIRECTIONS = ("dependent to head", "head to dependent")


@dataclass(frozen=True)
class Trees:
    """Gold trees of a batch.

    Args:
        words: the word that each token is a piece of, ``[batch, token]``; -1 for none.
        heads: each word's head, ``[batch, words]``; -1 for none.
        relations: the number of its relation, ``[batch, words]``; -1 for one that does not count.
    """

    words: Tensor
    heads: Tensor
    relations: Tensor


@torch.no_grad()
def arc_counts(weights: Tensor, trees: Trees, causal: bool, relations: int, offsets: Tensor) -> Counts:
    """How often a word's largest weight, special tokens and the word itself left out, is on its head, by its relation
    (the first ``relations`` columns), and on one of its dependents of a relation (the others).

    Arcs whose end is not seen do not count. Baselines are the words at fixed ``offsets``.

    Args:
        weights: of attention between tokens, ``[batch, heads, token, token]``.
        trees: of the batch.
        causal: whether later tokens are not seen.
        relations: how many relations there are.
        offsets: of the baselines, in words.
    """
    size = trees.heads.shape[1]
    among = other_words(trees.words, size, causal)
    chosen = most_attended(word_attention(weights, trees.words, size), among)
    arcs = (trees.heads.unsqueeze(-1) == torch.arange(size, device=among.device)) & (trees.relations >= 0).unsqueeze(-1)
    labels = (trees.relations.unsqueeze(-1) == torch.arange(relations, device=among.device)).double()
    up = torch.einsum("bwh,bwr->br", (arcs & among).double(), labels)
    down = torch.einsum("bwh,bwr->bhr", (arcs & among.transpose(1, 2)).double(), labels).clamp(max=1).sum(1)
    hits = _hits(chosen, trees, labels)
    baselines = _hits(at_offsets(among, offsets), trees, labels)
    return Counts(hits, torch.cat([up, down], dim=-1), baselines)


def _hits(chosen: Tensor, trees: Trees, labels: Tensor) -> Tensor:
    """Arcs among the chosen words ``[batch, rows, words]``, in both directions, ``[batch, rows, 2 * relations]``.

    Args:
        chosen: the word that each word chooses; -1 for none.
        trees: of the batch.
        labels: one-hot relations of the words, ``[batch, words, relations]``; zeros where none counts.
    """
    rows, seen = chosen.shape[1], chosen >= 0
    up = seen & (chosen == trees.heads.unsqueeze(1))
    index = chosen.clamp(min=0)
    back = trees.heads.unsqueeze(1).expand(-1, rows, -1).gather(2, index)
    down = seen & (back == torch.arange(chosen.shape[2], device=chosen.device))
    width = labels.shape[-1]
    reached = labels.unsqueeze(1).expand(-1, rows, -1, -1).gather(2, index.unsqueeze(-1).expand(-1, -1, -1, width))
    return torch.cat([up.double() @ labels, torch.einsum("brw,brwl->brl", down.double(), reached)], dim=-1)


class SyntacticShares(SentenceShares):
    """:func:`arc_counts` over the data; a column for each relation and direction.

    Args:
        sites: attention modules of the model.
        relations: names of the relations.
        reach: of the fixed offsets that heads are compared with, in words.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(
        self, sites: tuple[AttentionSite, ...], relations: Sequence[str], *, reach: int = REACH, **kwargs: Any
    ) -> None:
        self.relations = list(relations)
        self.offsets = offsets_within(reach, zero=False)
        super().__init__(sites, columns=2 * len(self.relations), baselines=len(self.offsets), **kwargs)

    @property
    def names(self) -> list[str]:
        return [f"{relation}, {direction}" for direction in DIRECTIONS for relation in self.relations]

    @property
    def baseline_names(self) -> list[str]:
        return [f"offset {offset:+d}" for offset in self.offsets.tolist()]

    def observe(self, site: int, weights: Tensor, view: View, trees: Trees) -> None:
        """Add the attention ``[batch, heads, token, token]`` of one site."""
        self.update(site, arc_counts(weights, trees, view.causal, len(self.relations), self.offsets), view.weights)
