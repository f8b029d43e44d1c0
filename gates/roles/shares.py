"""Shares of events per head with those of baselines, and how sure they are: a bootstrap over sentences in constant memory.

Every sentence counts once in the plain sums and ``Poisson(1)`` times in each replicate (the Poisson bootstrap, Chamandy et al.
2012). Its counts are drawn from its number alone, so results depend neither on batches nor on processes, replicates of a head
and of its baseline are of the same sentences, and nothing has to be kept of a sentence once it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gates.hooks.metric import HeadMetric
from gates.sites import KINDS, AttentionSite

REPLICATES = 200
"""Enough for standard errors (Efron and Tibshirani 1993)."""


def sentence_weights(sentences: Tensor, replicates: int = REPLICATES) -> Tensor:
    """How often every sentence counts, ``[batch, 1 + replicates]`` float64: once, then as often as each replicate drew it.

    Args:
        sentences: numbers of the sentences, ``[batch]``.
        replicates: of the bootstrap.
    """
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
        sites: attention modules of the model.
        columns: kinds of events.
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
