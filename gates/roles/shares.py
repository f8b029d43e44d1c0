"""Compute shares of events per head and per baseline, with a bootstrap over sentences in constant memory.

Every sentence counts once in the plain sums and ``Poisson(1)`` times in each replicate (the Poisson bootstrap, Chamandy et al.
2012). The number of the sentence is the seed of its counts. So results do not depend on batches or processes, a head and its
baseline have the same replicates, and no sentence is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gates.attention.sites import KINDS, AttentionSite
from gates.scores.metric import HeadMetric

REPLICATES = 200
"""The number of replicates, enough for standard errors (Efron and Tibshirani 1993)."""


def sentence_weights(sentences: Tensor, replicates: int = REPLICATES) -> Tensor:
    """Return how often every sentence counts, ``[batch, 1 + replicates]`` float64: once, then as often as each replicate drew
    it."""
    generator, ones = torch.Generator(), torch.ones(replicates, dtype=torch.float64)
    drawn = [torch.poisson(ones, generator=generator.manual_seed(int(number))) for number in sentences]
    return torch.cat([torch.ones(len(drawn), 1, dtype=torch.float64), torch.stack(drawn)], dim=1).to(sentences.device)


@dataclass(frozen=True)
class Counts:
    """Hold the counts of one site's heads in a batch, in columns such as offsets or relations."""

    hits: Tensor  # The events of every head, ``[batch, heads, columns]``
    chances: Tensor  # The opportunities, ``[batch, columns]``
    baselines: Tensor  # The events of every baseline at the same opportunities, ``[batch, baselines, columns]``


@dataclass(frozen=True)
class Shares:
    """Hold shares of events in opportunities over the data; NaN without an opportunity."""

    value: Tensor  # The shares, ``[heads, columns]``
    error: Tensor  # The standard errors over sentences, ``[heads, columns]``
    baseline: Tensor  # The shares of the best baseline of each column, ``[heads, columns]``
    which: Tensor  # The number of that baseline, ``[heads, columns]``
    difference_error: Tensor  # The standard errors of value minus baseline, ``[heads, columns]``
    count: Tensor  # The opportunities, ``[heads, columns]``
    replicates: Tensor  # The values of every replicate, ``[replicates, heads, columns]``

    def of(self, *columns: int) -> Shares:
        """Return some of the columns."""
        chosen = list(columns)
        return Shares(**{name: values[..., chosen] for name, values in vars(self).items()})

    def of_heads(self, heads: Tensor) -> Shares:
        """Return some of the heads, by their indices."""
        return Shares(**{name: values.index_select(-2, heads) for name, values in vars(self).items()})

    def against_column(self, column: int, other: int) -> Shares:
        """Return shares whose baseline in a column is the heads' share in another column, where that is larger."""
        larger = self.value[:, other] > self.baseline[:, column].nan_to_num(-1.0)
        difference = _spread(self.replicates[:, :, column] - self.replicates[:, :, other])
        baseline, error, which = self.baseline.clone(), self.difference_error.clone(), self.which.clone()
        baseline[larger, column] = self.value[larger, other]
        error[larger, column] = difference[larger]
        which[larger, column] = -1
        return Shares(self.value, self.error, baseline, which, error, self.count, self.replicates)


class SentenceShares(HeadMetric):
    """Sum events, opportunities and baselines' events over sentences, with bootstrap replicates, exactly under DDP.

    The state has ``(1 + replicates) * heads * columns`` numbers, and those of the baselines.

    Args:
        baselines: The number of baselines, which heads of one kind of attention share.
    """

    hits: Tensor
    chances: Tensor
    baseline_hits: Tensor

    def __init__(self, sites: tuple[AttentionSite, ...], columns: int, baselines: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sizes = [site.heads for site in sites]
        self._kinds = [KINDS.index(site.kind) for site in sites]
        self._leading = {self._kinds.index(kind) for kind in set(self._kinds)}
        rows = 1 + REPLICATES
        self.add_sums(hits=[rows, sum(self._sizes), columns], chances=[rows, len(KINDS), columns])
        self.add_sums(baseline_hits=[rows, len(KINDS), baselines, columns])

    def update(self, site: int, counts: Counts, weights: Tensor) -> None:
        """Add a batch of one site.

        Args:
            weights: The weights of the examples, ``[batch, 1 + replicates]``; see :func:`sentence_weights`.
        """
        weights = weights.to(self.hits.device)  # sites may be on several devices
        self.hits.split(self._sizes, dim=1)[site].add_(_weighted(weights, counts.hits))
        if site in self._leading:  # other sites of its kind have equal counts
            self.chances[:, self._kinds[site]].add_(_weighted(weights, counts.chances))
            self.baseline_hits[:, self._kinds[site]].add_(_weighted(weights, counts.baselines))

    def compute(self) -> Shares:
        """Return the shares of every head. The best baseline is chosen on the data and is the same in every replicate."""
        sizes = torch.tensor(self._sizes, device=self.hits.device)
        kinds = torch.tensor(self._kinds, device=self.hits.device).repeat_interleave(sizes)
        values = self.hits / self.chances[:, kinds]
        baselines = self.baseline_hits / self.chances.unsqueeze(2)  # by kind, because one row per head needs much more memory
        best = baselines[0].nan_to_num(-1.0).max(1).indices
        found = baselines.gather(2, best.expand(len(values), -1, -1).unsqueeze(2)).squeeze(2)[:, kinds]
        return Shares(
            value=values[0],
            error=_spread(values[1:]),
            baseline=found[0],
            which=best[kinds],
            difference_error=_spread(values[1:] - found[1:]),
            count=self.chances[0, kinds],
            replicates=values[1:],
        )


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Sum values ``[batch, ...]`` with each of the weights ``[batch, rows]`` to ``[rows, ...]``."""
    return torch.tensordot(weights.T, values.to(weights), dims=1)


def _spread(replicates: Tensor) -> Tensor:
    """Return the standard deviation over replicates with an opportunity; NaN if there are none."""
    known = replicates.isfinite()
    count = known.sum(0)
    mean = replicates.nan_to_num(0.0, 0.0, 0.0).sum(0) / count
    squares = torch.where(known, (replicates - mean) ** 2, 0.0).sum(0)
    return torch.where(count > 0, (squares / (count - 1).clamp(min=1)).sqrt(), torch.nan)


@dataclass(frozen=True)
class View:
    """Hold the queries and keys of a batch for one kind of attention."""

    # The number of every example in the whole data, ``[batch]``. Examples of one sentence are resampled together.
    sentences: Tensor
    queries: Tensor  # The tokens whose attention counts, ``[batch, query]``, without padding and special tokens
    keys: Tensor  # The tokens without padding, ``[batch, key]``
    text: Tensor  # The keys without special tokens, ``[batch, key]``
    causal: bool = False  # Whether queries do not see later keys

    @cached_property
    def visible(self) -> Tensor:
        """Return the visible keys of every query, ``[batch, query, key]``."""
        return visible_keys(self.queries.shape[1], self.keys, self.causal)

    @cached_property
    def weights(self) -> Tensor:
        """Return how often every example counts in each bootstrap replicate, ``[batch, 1 + replicates]``."""
        return sentence_weights(self.sentences)


def visible_keys(queries: int, keys: Tensor, causal: bool) -> Tensor:
    """Expand keys ``[batch, key]`` to ``[batch, query, key]``, without later keys under causal attention."""
    seen = keys.unsqueeze(1).expand(-1, queries, -1)
    return seen & torch.ones(queries, keys.shape[1], dtype=torch.bool, device=keys.device).tril() if causal else seen


def most_attended(weights: Tensor, among: Tensor) -> Tensor:
    """Return the key with the largest weight for every query, ``[batch, heads, query]``, among allowed keys ``[batch, query,
    key]``; -1 for queries without keys."""
    allowed = among.unsqueeze(1)
    chosen = weights.masked_fill(~allowed, -1.0).argmax(-1)
    return chosen.masked_fill(~allowed.any(-1), -1)


def at_offsets(among: Tensor, offsets: Tensor) -> Tensor:
    """Return the key at each fixed distance from every query, ``[batch, offsets, query]``; -1 where it is not among the keys
    ``[batch, query, key]``."""
    queries, keys = among.shape[1:]
    place = torch.arange(queries, device=among.device) + offsets.to(among.device).unsqueeze(1)
    inside = (place >= 0) & (place < keys)
    index = place.clamp(0, keys - 1)
    taken = among.gather(2, index.T.expand(len(among), -1, -1)).transpose(1, 2)
    return torch.where(inside & taken, place, -1)


def offsets_within(reach: int, *, zero: bool = True) -> Tensor:
    """Return the distances from ``-reach`` to ``reach``, with or without 0."""
    offsets = torch.arange(-reach, reach + 1)
    return offsets if zero else offsets[offsets != 0]


def is_among(chosen: Tensor, targets: Tensor) -> Tensor:
    """Return whether chosen keys ``[batch, rows, query]`` are targets ``[batch, query, key]``; -1 is not."""
    found = targets.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1).gather(3, chosen.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found & (chosen >= 0)


def word_attention(weights: Tensor, words: Tensor, count: int) -> Tensor:
    """Return attention between words ``[batch, heads, words, words]`` from attention between tokens.

    It is summed over the tokens of the key's word, and averaged over those of the query's word (Clark et al. 2019, section
    4.1). The weights are ``[batch, heads, token, token]``, and ``words`` has the word of each token, ``[batch, token]``.
    Special tokens have -1 and do not count.
    """
    member = (words.unsqueeze(-1) == torch.arange(count, device=words.device)).to(weights.dtype)
    mean = member / member.sum(1, keepdim=True).clamp(min=1)
    return mean.transpose(1, 2).unsqueeze(1) @ (weights @ member.unsqueeze(1))


def other_words(words: Tensor, count: int, causal: bool) -> Tensor:
    """Return the words that each word can attend to, ``[batch, words, words]``: existing words except itself, and only
    earlier ones if causal."""
    places = torch.arange(count, device=words.device)
    there = (words.unsqueeze(-1) == places).any(1)
    apart = places.unsqueeze(0) < places.unsqueeze(1) if causal else places.unsqueeze(0) != places.unsqueeze(1)
    return there.unsqueeze(1) & there.unsqueeze(2) & apart
