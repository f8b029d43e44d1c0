"""Shares of events per head with those of baselines, and how sure they are: a bootstrap over sentences in constant memory.

Every sentence counts once in the plain sums and ``Poisson(1)`` times in each replicate (the Poisson bootstrap, Chamandy et al.
2012). Its counts are drawn from its number alone, so results depend neither on batches nor on processes, replicates of a head
and of its baseline are of the same sentences, and nothing has to be kept of a sentence once it is counted.
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
"""Enough for standard errors (Efron and Tibshirani 1993)."""


def sentence_weights(sentences: Tensor, replicates: int = REPLICATES) -> Tensor:
    """Return how often every sentence, by its number, counts, ``[batch, 1 + replicates]`` float64: once, then as often as each
    replicate drew it."""
    generator, ones = torch.Generator(), torch.ones(replicates, dtype=torch.float64)
    drawn = [torch.poisson(ones, generator=generator.manual_seed(int(number))) for number in sentences]
    return torch.cat([torch.ones(len(drawn), 1, dtype=torch.float64), torch.stack(drawn)], dim=1).to(sentences.device)


@dataclass(frozen=True)
class Counts:
    """What one site's heads did in a batch, in columns such as offsets or relations.

    Args:
        hits: events of every head, ``[batch, heads, columns]``.
        chances: opportunities, ``[batch, columns]``.
        baselines: events of every baseline at the same opportunities, ``[batch, baselines, columns]``.
    """

    hits: Tensor
    chances: Tensor
    baselines: Tensor


@dataclass(frozen=True)
class Shares:
    """Shares of events in opportunities, over the data; NaN where there was no opportunity.

    Args:
        value: ``[heads, columns]``.
        error: standard errors over sentences, ``[heads, columns]``.
        baseline: shares of the best baseline of each column, ``[heads, columns]``.
        which: the number of that baseline, ``[heads, columns]``.
        difference_error: standard errors of value minus baseline, ``[heads, columns]``.
        count: opportunities, ``[heads, columns]``.
        replicates: values of every replicate, ``[replicates, heads, columns]``.
    """

    value: Tensor
    error: Tensor
    baseline: Tensor
    which: Tensor
    difference_error: Tensor
    count: Tensor
    replicates: Tensor

    def of(self, *columns: int) -> Shares:
        """Some of the columns."""
        chosen = list(columns)
        return Shares(**{name: values[..., chosen] for name, values in vars(self).items()})

    def of_heads(self, heads: Tensor) -> Shares:
        """Some of the heads, by their places."""
        return Shares(**{name: values.index_select(-2, heads) for name, values in vars(self).items()})

    def against_column(self, column: int, other: int) -> Shares:
        """The same with the heads' own share in another column as the baseline of a column, where that is larger."""
        larger = self.value[:, other] > self.baseline[:, column].nan_to_num(-1.0)
        difference = _spread(self.replicates[:, :, column] - self.replicates[:, :, other])
        baseline, error, which = self.baseline.clone(), self.difference_error.clone(), self.which.clone()
        baseline[larger, column] = self.value[larger, other]
        error[larger, column] = difference[larger]
        which[larger, column] = -1
        return Shares(self.value, self.error, baseline, which, error, self.count, self.replicates)


class SentenceShares(HeadMetric):
    """Sums of events, opportunities and baselines' events over sentences, with bootstrap replicates; exact under DDP.

    The state has the same size whatever the data: ``(1 + replicates) * heads * columns`` numbers and those of the baselines.

    Args:
        baselines: rows of baselines, which heads of one kind of attention share.
        kwargs: arguments of :class:`torchmetrics.Metric`.
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
        for name, shape in {
            "hits": (rows, sum(self._sizes), columns),
            "chances": (rows, len(KINDS), columns),
            "baseline_hits": (rows, len(KINDS), baselines, columns),
        }.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, site: int, counts: Counts, weights: Tensor) -> None:
        """Add a batch of one site.

        Args:
            site: index of the site.
            counts: of its heads.
            weights: of the examples, ``[batch, 1 + replicates]``, see :func:`sentence_weights`.
        """
        weights = weights.to(self.hits.device)  # sites may be on several devices
        self.hits.split(self._sizes, dim=1)[site].add_(_weighted(weights, counts.hits))
        if site in self._leading:  # the other sites of its kind have the same
            self.chances[:, self._kinds[site]].add_(_weighted(weights, counts.chances))
            self.baseline_hits[:, self._kinds[site]].add_(_weighted(weights, counts.baselines))

    def compute(self) -> Shares:
        """Shares of every head; the best baseline is that of the data, the same in every replicate."""
        sizes = torch.tensor(self._sizes, device=self.hits.device)
        kinds = torch.tensor(self._kinds, device=self.hits.device).repeat_interleave(sizes)
        values = self.hits / self.chances[:, kinds]
        baselines = self.baseline_hits / self.chances.unsqueeze(2)  # of kinds: those of every head would be many times as many
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
    """Sums over a batch ``[batch, ...]`` for each of the weights ``[batch, rows]``, ``[rows, ...]``."""
    return torch.tensordot(weights.T, values.to(weights), dims=1)


def _spread(replicates: Tensor) -> Tensor:
    """Standard deviation over replicates, but for those that drew no opportunity; NaN where there are none."""
    known = replicates.isfinite()
    count = known.sum(0)
    mean = replicates.nan_to_num(0.0, 0.0, 0.0).sum(0) / count
    squares = torch.where(known, (replicates - mean) ** 2, 0.0).sum(0)
    return torch.where(count > 0, (squares / (count - 1).clamp(min=1)).sqrt(), torch.nan)


# A batch as the heads of one kind of attention see it, and where their largest weights fall.


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
    """Return the key with the largest weight for every query, ``[batch, heads, query]``, among those that may be chosen,
    ``[batch, query, key]``; -1 for queries without keys."""
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
    """Distances from ``-reach`` to ``reach``, with or without 0."""
    offsets = torch.arange(-reach, reach + 1)
    return offsets if zero else offsets[offsets != 0]


def is_among(chosen: Tensor, targets: Tensor) -> Tensor:
    """Whether chosen keys ``[batch, rows, query]`` are targets ``[batch, query, key]``; -1 is not."""
    found = targets.unsqueeze(1).expand(-1, chosen.shape[1], -1, -1).gather(3, chosen.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found & (chosen >= 0)


# Attention between words from attention between their pieces (Clark et al. 2019, section 4.1).


def word_attention(weights: Tensor, words: Tensor, count: int) -> Tensor:
    """Return attention from word to word, ``[batch, heads, words, words]``: summed over the pieces that are attended to, and
    averaged over the pieces that attend.

    The weights are ``[batch, heads, token, token]``; ``words`` is the word that each token is a piece of, ``[batch, token]``.
    Special tokens belong to no word, -1, so their attention is left out.
    """
    member = (words.unsqueeze(-1) == torch.arange(count, device=words.device)).to(weights.dtype)
    mean = member / member.sum(1, keepdim=True).clamp(min=1)
    return mean.transpose(1, 2).unsqueeze(1) @ (weights @ member.unsqueeze(1))


def other_words(words: Tensor, count: int, causal: bool) -> Tensor:
    """Return words that each word may attend to, ``[batch, words, words]``: those with a piece, but itself; earlier ones if
    causal."""
    places = torch.arange(count, device=words.device)
    there = (words.unsqueeze(-1) == places).any(1)
    apart = places.unsqueeze(0) < places.unsqueeze(1) if causal else places.unsqueeze(0) != places.unsqueeze(1)
    return there.unsqueeze(1) & there.unsqueeze(2) & apart
