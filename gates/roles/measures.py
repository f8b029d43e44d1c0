"""Count for each role how often a head's largest weight is in the place of the role.

The roles are positions, syntax, coreference, copies, rare tokens and sinks (Voita et al. 2019; Clark et al. 2019; Olsson et al.
2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gates.attention.sites import AttentionSite
from gates.roles.shares import (
    Counts,
    SentenceShares,
    View,
    at_offsets,
    is_among,
    most_attended,
    offsets_within,
    other_words,
    word_attention,
)

Sites = tuple[AttentionSite, ...]


class RoleShares(SentenceShares):
    """Accumulate the counts of one measure over the data.

    Args:
        counts: The measure, a function of attention weights ``[batch, heads, query, key]``, their :class:`View`, and further
            data such as :class:`Trees`.
        names: The names of the columns.
    """

    def __init__(self, sites: Sites, counts: Callable[..., Counts], names: Sequence[str], baselines: int) -> None:
        super().__init__(sites, columns=len(names), baselines=baselines)
        self.counts, self.names = counts, list(names)

    def observe(self, site: int, weights: Tensor, view: View, *data: Any) -> None:
        """Add the attention of one site."""
        self.update(site, self.counts(weights, view, *data), view.weights)


# Positional heads: the largest weight is on one relative position (Voita et al. 2019, section 5.1).

REACH = 10
"""The largest relative position, in tokens."""


@torch.no_grad()
def positional_counts(weights: Tensor, view: View, offsets: Tensor) -> Counts:
    """Count how often the largest weight, including special tokens, is at each offset.

    Queries that see a single key do not count. The baseline has its largest weight on a uniformly drawn visible key.

    Args:
        weights: The attention weights, ``[batch, heads, query, key]``.
        offsets: The offsets, ``[columns]``.
    """
    visible = view.visible
    counted = view.queries & (visible.sum(-1) > 1)
    place = torch.arange(weights.shape[2], device=weights.device)
    relative = most_attended(weights, visible) - place
    hits = (relative.unsqueeze(-1) == offsets.to(weights.device)) & counted[:, None, :, None]
    there = (at_offsets(visible, offsets) >= 0).transpose(1, 2) & counted.unsqueeze(-1)
    uniform = (there / visible.sum(-1, keepdim=True).clamp(min=1)).sum(1, keepdim=True)
    return Counts(hits.sum(2), counted.sum(-1, keepdim=True).expand(-1, len(offsets)), uniform)


def positional_shares(sites: Sites) -> RoleShares:
    """Return the Metric of :func:`positional_counts`, with a column for each offset up to :data:`REACH`."""
    offsets = offsets_within(REACH)
    names = [f"{offset:+d}" for offset in offsets.tolist()]
    return RoleShares(sites, partial(positional_counts, offsets=offsets), names, baselines=1)


# Syntactic heads: the largest weight is on a word's head or dependent in a gold tree (Voita et al. 2019, section 5.2; Clark et
# al. 2019, section 4.2).

DIRECTIONS = ("dependent to head", "head to dependent")
WORD_OFFSETS = offsets_within(REACH, zero=False)
"""The distances of the words that are baselines of syntactic heads."""


@dataclass(frozen=True)
class Trees:
    """Hold the gold trees of a batch."""

    words: Tensor  # The word of each token, ``[batch, token]``; -1 for none
    heads: Tensor  # The head of each word, ``[batch, words]``; -1 for none
    relations: Tensor  # The number of each word's relation, ``[batch, words]``; -1 for one that does not count


@torch.no_grad()
def arc_counts(weights: Tensor, view: View, trees: Trees, relations: int, offsets: Tensor) -> Counts:
    """Count how often a word's largest weight is on its head or on a dependent, by relation.

    Special tokens and the word itself are excluded. The first ``relations`` columns are for heads, the others for dependents.
    The weights are ``[batch, heads, token, token]``. Arcs with an invisible end do not count. Baselines are the words at fixed
    ``offsets``.
    """
    size = trees.heads.shape[1]
    among = other_words(trees.words, size, view.causal)
    chosen = most_attended(word_attention(weights, trees.words, size), among)
    arcs = (trees.heads.unsqueeze(-1) == torch.arange(size, device=among.device)) & (trees.relations >= 0).unsqueeze(-1)
    labels = (trees.relations.unsqueeze(-1) == torch.arange(relations, device=among.device)).double()
    up = torch.einsum("bwh,bwr->br", (arcs & among).double(), labels)
    down = torch.einsum("bwh,bwr->bhr", (arcs & among.transpose(1, 2)).double(), labels).clamp(max=1).sum(1)
    hits = _hits(chosen, trees, labels)
    baselines = _hits(at_offsets(among, offsets), trees, labels)
    return Counts(hits, torch.cat([up, down], dim=-1), baselines)


def _hits(chosen: Tensor, trees: Trees, labels: Tensor) -> Tensor:
    """Count the arcs among the chosen words in both directions, ``[batch, rows, 2 * relations]``.

    Args:
        chosen: The word that each word chooses, ``[batch, rows, words]``; -1 for none.
        labels: The one-hot relations of the words, ``[batch, words, relations]``; zeros where none counts.
    """
    rows, seen = chosen.shape[1], chosen >= 0
    up = seen & (chosen == trees.heads.unsqueeze(1))
    index = chosen.clamp(min=0)
    back = trees.heads.unsqueeze(1).expand(-1, rows, -1).gather(2, index)
    down = seen & (back == torch.arange(chosen.shape[2], device=chosen.device))
    width = labels.shape[-1]
    reached = labels.unsqueeze(1).expand(-1, rows, -1, -1).gather(2, index.unsqueeze(-1).expand(-1, -1, -1, width))
    return torch.cat([up.double() @ labels, torch.einsum("brw,brwl->brl", down.double(), reached)], dim=-1)


def syntactic_shares(sites: Sites, relations: Sequence[str]) -> RoleShares:
    """Return the Metric of :func:`arc_counts`, with a column for each relation and direction, and :data:`WORD_OFFSETS` as
    baselines."""
    counts = partial(arc_counts, relations=len(relations), offsets=WORD_OFFSETS)
    names = [f"{relation}, {direction}" for direction in DIRECTIONS for relation in relations]
    return RoleShares(sites, counts, names, baselines=len(WORD_OFFSETS))


# Coreference heads: a pronoun's largest weight is on its antecedent (Clark et al. 2019, section 4.3).

COREFERENCE_REACH = 30
NEAREST = 0
"""The number of the first baseline. The others are fixed offsets."""


@dataclass(frozen=True)
class Mentions:
    """Hold a pronoun in every example, and its candidates."""

    words: Tensor  # The word of each token, ``[batch, token]``; -1 for none
    pronouns: Tensor  # The pronoun, ``[batch, words]``, exactly one in each example
    antecedents: Tensor  # The words of its antecedent, ``[batch, words]``
    others: Tensor  # The words of the other candidate, ``[batch, words]``, if there is one


@torch.no_grad()
def mention_counts(weights: Tensor, view: View, mentions: Mentions, offsets: Tensor) -> Counts:
    """Count how often a pronoun's largest weight is on the antecedent or on the other candidate, and which it prefers.

    Special tokens and the pronoun are excluded. The last column counts how often the antecedent's best word has more weight
    than the other candidate's. An example counts if the antecedent is visible, and in the last two columns if the other
    candidate is too. The baseline of the preference is the nearer candidate; those of the first two columns are the words at
    fixed ``offsets``.

    Args:
        weights: The attention weights, ``[batch, heads, token, token]``.
    """
    size = mentions.pronouns.shape[1]
    place = mentions.pronouns.long().argmax(-1)
    batch = torch.arange(len(place), device=place.device)
    among = other_words(mentions.words, size, view.causal)[batch, place].unsqueeze(1)  # [batch, 1, words]: the pronoun's row
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


def coreference_shares(sites: Sites) -> RoleShares:
    """Return the Metric of :func:`mention_counts`."""
    offsets = offsets_within(COREFERENCE_REACH, zero=False)
    names = ["antecedent", "other candidate", "choice"]
    return RoleShares(sites, partial(mention_counts, offsets=offsets), names, baselines=1 + len(offsets))


# Induction and duplicate-token heads (Olsson et al. 2022; Wang et al. 2022): in a repeated random sequence, the largest weight
# is on the token after the earlier copy, or on that copy.

LENGTHS = (8, 32)
"""The minimum and maximum length of a sequence. Lengths vary, so no fixed offset finds the copy."""


def repeated_sequences(
    tokens: Sequence[int], rows: int, *, start: int | None = None, longest: int = LENGTHS[1], seed: int = 0
) -> list[list[int]]:
    """Return random sequences of distinct tokens, each repeated once, after the token ``start`` if there is one."""
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
    """Return the last earlier position of the same token in ids ``[batch, token]``; -1 for none, and for tokens that are not
    text."""
    same = (ids.unsqueeze(1) == ids.unsqueeze(2)) & text.unsqueeze(1) & text.unsqueeze(2)
    before = same & torch.ones_like(same).tril(-1)
    place = torch.arange(ids.shape[1], device=ids.device)
    return torch.where(before, place, -1).amax(-1)


@torch.no_grad()
def copy_counts(weights: Tensor, view: View, earlier: Tensor, offsets: Tensor) -> Counts:
    """Count how often the largest weight, without special tokens, is on the token after the earlier copy, and on the copy.

    The weights are ``[batch, heads, token, token]``, and ``earlier`` has the copies, -1 for none. Baselines are a uniformly
    drawn token, then the token at each of ``offsets``.
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


def copy_shares(sites: Sites) -> RoleShares:
    """Return the Metric of :func:`copy_counts`."""
    offsets = torch.arange(-LENGTHS[1], 1)
    return RoleShares(sites, partial(copy_counts, offsets=offsets), ["induction", "duplicate"], baselines=1 + len(offsets))


# Rare-token heads: the largest weight is on the rarest tokens of the sentence (Voita et al. 2019, section 5.3). A sentence
# counts if its rarest token is not among the most frequent tokens.

COMMON = 500


def token_counts(counts: Tensor, common: int = COMMON) -> tuple[Tensor, Tensor]:
    """Return the frequencies of the vocabulary in training data, and which tokens are among the ``common`` most frequent."""
    frequent = torch.zeros(len(counts), dtype=torch.bool)
    frequent[counts.argsort(descending=True, stable=True)[:common]] = True
    return counts, frequent & (counts > 0)


@torch.no_grad()
def rare_counts(weights: Tensor, view: View, frequency: Tensor, common: Tensor, offsets: Tensor) -> Counts:
    """Count how often the largest weight is on the rarest, and on one of the two rarest tokens that a query sees.

    Special tokens are excluded. Tokens of equal frequency are equally rare. Baselines are a uniformly drawn token, then the
    token at each of ``offsets``.

    Args:
        weights: The attention weights, ``[batch, heads, query, key]``.
        frequency: The frequency of each key in training data, ``[batch, key]``.
        common: Whether each key is a frequent token, ``[batch, key]``.
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
    """Return the smallest value among the keys of each query, ``[batch, query, 1]``."""
    return values.masked_fill(~among, torch.inf).amin(-1, keepdim=True)


def rare_token_shares(sites: Sites) -> RoleShares:
    """Return the Metric of :func:`rare_counts`."""
    offsets = offsets_within(REACH)
    return RoleShares(sites, partial(rare_counts, offsets=offsets), ["rarest", "two rarest"], baselines=1 + len(offsets))


# Uninformative attention: on separators, on the first token, or uniform (Clark et al. 2019, section 3).

CONFIDENCE = 3
"""The column of confidence in :func:`sink_shares`."""


@torch.no_grad()
def sink_counts(weights: Tensor, view: View) -> Counts:
    """Sum four measures of weights ``[batch, heads, query, key]`` over queries.

    They are the attention on separators (special tokens except the first), the attention on the first token, normalised
    entropy, and confidence. Confidence is the largest weight without special tokens (Voita et al. 2019). The baseline of the
    first two is uniform attention. A query counts if it sees two keys, and for separators and first tokens if it sees one of
    these.
    """
    visible, keys = view.visible, view.keys
    first = keys & (keys.cumsum(-1) == 1)
    separators = keys & ~view.text & ~first
    size = visible.sum(-1)
    counted = view.queries & (size > 1)
    hits, chances, uniform = [], [], []
    for among in (separators, first):
        seen = (visible & among.unsqueeze(1)).sum(-1)
        counts = counted & (seen > 0)
        on = torch.einsum("bhqk,bk,bq->bh", weights.double(), among.double(), counts.double())
        hits.append(on)
        chances.append(counts.sum(-1))
        uniform.append((seen / size.clamp(min=1) * counts).sum(-1))
    p = weights.double().clamp(min=0)
    entropy = -torch.xlogy(p, p).sum(-1) / size.clamp(min=2).log().unsqueeze(1)
    hits.append((entropy * counted.unsqueeze(1)).sum(-1))
    largest = (p * (visible & view.text.unsqueeze(1)).unsqueeze(1)).amax(-1)
    hits.append((largest * counted.unsqueeze(1)).sum(-1))
    for _ in range(2):
        chances.append(counted.sum(-1))
        uniform.append(torch.full_like(uniform[0], torch.nan))
    return Counts(torch.stack(hits, -1), torch.stack(chances, -1), torch.stack(uniform, -1).unsqueeze(1))


def sink_shares(sites: Sites) -> RoleShares:
    """Return the Metric of :func:`sink_counts`."""
    return RoleShares(sites, sink_counts, ["separator", "first-token", "broad", "confidence"], baselines=1)
