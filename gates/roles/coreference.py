"""Coreference heads: a pronoun's largest weight falls on its antecedent (Clark et al. 2019, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gates.roles.shares import Counts, SentenceShares
from gates.roles.view import View, is_among, most_attended, offsets_within
from gates.roles.words import other_words, word_attention
from gates.sites import AttentionSite

COREFERENCE_REACH = 30
NEAREST = 0
"""The first baseline; the others are fixed offsets."""


@dataclass(frozen=True)
class Mentions:
    """A pronoun in every example, and the words it may stand for.

    Args:
        words: the word that each token is a piece of, ``[batch, token]``; -1 for none.
        pronouns: ``[batch, words]``, a single one in each example.
        antecedents: words of the mention it stands for, ``[batch, words]``.
        others: words of the other candidate, ``[batch, words]``; none where there is none.
    """

    words: Tensor
    pronouns: Tensor
    antecedents: Tensor
    others: Tensor


@torch.no_grad()
def mention_counts(weights: Tensor, mentions: Mentions, causal: bool, offsets: Tensor) -> Counts:
    """How often a pronoun's largest weight, special tokens and the pronoun left out, is on the antecedent, on the other
    candidate, and how often the antecedent's best word has more than the other candidate's.

    An example counts where the antecedent is seen, and in the last two columns where the other candidate is seen too.
    Baselines: the candidate that is nearer to the pronoun, for the choice; the words at fixed ``offsets``, for the first two.

    Args:
        weights: of attention between tokens, ``[batch, heads, token, token]``.
        mentions: of the batch.
        causal: whether later tokens are not seen.
        offsets: of the baselines, in words.
    """
    size = mentions.pronouns.shape[1]
    place = mentions.pronouns.long().argmax(-1)
    batch = torch.arange(len(place), device=place.device)
    among = other_words(mentions.words, size, causal)[batch, place].unsqueeze(1)  # [batch, 1, words]: of the pronoun alone
    attention = word_attention(weights, mentions.words, size)[batch, :, place].unsqueeze(2)
    right, wrong = (part.unsqueeze(1) & among for part in (mentions.antecedents, mentions.others))
    counted = right.any(-1) & mentions.pronouns.any(-1, keepdim=True)
    both = counted & wrong.any(-1)
    chosen = most_attended(attention, among)
    best_right, best_wrong = (attention.masked_fill(~part.unsqueeze(1), -1.0).amax(-1) for part in (right, wrong))
    hits = [is_among(chosen, right) & counted.unsqueeze(1), is_among(chosen, wrong) & both.unsqueeze(1)]
    hits.append((best_right > best_wrong) & both.unsqueeze(1))
    fixed = place.unsqueeze(1) + offsets.to(place.device)
    inside = (fixed >= 0) & (fixed < size)
    fixed = torch.where(inside, fixed, -1).unsqueeze(-1)
    rows = [is_among(fixed, right) & counted.unsqueeze(1), is_among(fixed, wrong) & both.unsqueeze(1)]
    baselines = torch.zeros(len(place), 1 + len(offsets), 3, dtype=torch.float64, device=place.device)
    baselines[:, 1:, :2] = torch.stack([row.squeeze(-1) for row in rows], -1).double()
    distance = (torch.arange(size, device=place.device) - place.unsqueeze(1)).abs()
    near_right, near_wrong = (distance.masked_fill(~part.squeeze(1), size).amin(-1) for part in (right, wrong))
    baselines[:, NEAREST, 2] = ((near_right < near_wrong) & both.squeeze(1)).double()
    chances = torch.stack([counted.squeeze(1), both.squeeze(1), both.squeeze(1)], -1)
    return Counts(torch.stack([hit.squeeze(-1) for hit in hits], -1), chances, baselines)


class CoreferenceShares(SentenceShares):
    """:func:`mention_counts` over the data.

    Args:
        sites: attention modules of the model.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    names = ["antecedent", "other candidate", "choice"]

    def __init__(self, sites: tuple[AttentionSite, ...], **kwargs: Any) -> None:
        self.offsets = offsets_within(COREFERENCE_REACH, zero=False)
        super().__init__(sites, columns=len(self.names), baselines=1 + len(self.offsets), **kwargs)

    @property
    def baseline_names(self) -> list[str]:
        return ["nearer candidate", *(f"offset {offset:+d}" for offset in self.offsets.tolist())]

    def observe(self, site: int, weights: Tensor, view: View, mentions: Mentions) -> None:
        """Add the attention ``[batch, heads, token, token]`` of one site."""
        self.update(site, mention_counts(weights, mentions, view.causal, self.offsets), view.weights)
