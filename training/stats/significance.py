"""Intervals over seeds, tests, corrections for their number, and agreement of masks and rankings. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from scipy.special import expit, logit

from gates.errors import GateError
from training.stats.bootstrap import LEVEL, Array
from training.stats.numbers import counted

SIGNIFICANCE = 0.05
"""Below it p is called significant."""
MINIMUM_BLOCKS = 6
"""Fewer non-zero paired differences cannot reach p < 0.05: the exact two-sided Wilcoxon p is at least 2 / 2^blocks."""


# -- over seeds ------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """Mean, standard deviation (n - 1) and confidence interval of the mean of so many seeds."""

    mean: float
    std: float
    low: float
    high: float
    seeds: int


def interval(values: ArrayLike, level: float = LEVEL, *, bounds: tuple[float, float] | None = None) -> Interval:
    """Mean over seeds with Student's t interval, right for few values of a normal spread; one value has none (NaN).

    Of a metric with bounds it is that of the log odds of the mean, by the delta method, brought back (the logit interval of
    Korn and Graubard 1998, the one that Stata's ``proportion`` states). With few seeds and means near a bound the plain
    interval would reach beyond it, and a clipped one would put all of its error on the other side. Log odds of the mean, not
    the mean of log odds: a seed may lie on the bound. Where there is a least value alone, the logarithm of the distance from it
    is in their place.

    Args:
        values: ``[seeds]``.
        level: of confidence.
        bounds: least and largest value that the metric can take; None for a metric without.

    Raises:
        GateError: if there is no value, or one lies beyond the bounds.
    """
    sample = np.asarray(values, dtype=float).ravel()
    count = len(sample)
    if count == 0:
        raise GateError("there are no values to take the mean of; expected at least one seed")
    mean = float(sample.mean())
    if count == 1:
        return Interval(mean, np.nan, np.nan, np.nan, 1)
    std = float(sample.std(ddof=1))
    half = float(stats.t.ppf((1 + level) / 2, count - 1)) * std / count**0.5
    if bounds is None or half == 0:
        return Interval(mean, std, mean - half, mean + half, count)
    if bounds[1] == np.inf:
        if not sample.min() >= bounds[0]:
            raise GateError(f"values from {sample.min():g} to {sample.max():g} are not {bounds[0]:g} or more")
        reach = half / (mean - bounds[0])  # the derivative of the logarithm
        low, high = (bounds[0] + (mean - bounds[0]) * float(np.exp(side * reach)) for side in (-1, 1))
        return Interval(mean, std, low, high, count)
    least, size = bounds[0], bounds[1] - bounds[0]
    share = (mean - least) / size
    if not (0 < share < 1 and bounds[0] <= sample.min() and sample.max() <= bounds[1]):
        raise GateError(f"values from {sample.min():g} to {sample.max():g} are not within {bounds[0]:g} and {bounds[1]:g}")
    reach = half / (size * share * (1 - share))  # the derivative of the log odds
    low, high = (least + size * float(expit(logit(share) + side * reach)) for side in (-1, 1))
    return Interval(mean, std, low, high, count)


# -- other tests ---------------------------------------------------------------------------------------------------


def mcnemar(correct_a: ArrayLike, correct_b: ArrayLike) -> float:
    """Exact McNemar test (1947) of two systems on the same examples: the two-sided binomial p of the examples that only one
    of them gets right; 1 if there is none.

    Args:
        correct_a, correct_b: booleans ``[examples]``.
    """
    first, second = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    if first.shape != second.shape:
        raise GateError(f"McNemar's test has {first.size} and {second.size} examples; expected the same ones")
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    discordant = only_first + only_second
    return float(stats.binomtest(only_first, discordant).pvalue) if discordant else 1.0


def holm(p_values: ArrayLike) -> Array:
    """p values corrected for their number by Holm's step-down method (1979), in their order ``[tests]``."""
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(stepped, 1.0)
    return corrected


@dataclass(frozen=True)
class RankTest:
    """A test on ranks over seeds, its blocks.

    Args:
        statistic, p: None where there are too few blocks.
        blocks: that the test has.
        average_ranks: of each method (1 is best), in the order given; for the Wilcoxon test empty.
        reason: why there is no p value; empty if there is one.
    """

    statistic: float | None
    p: float | None
    blocks: int
    average_ranks: tuple[float, ...] = ()
    reason: str = ""


def wilcoxon(a: ArrayLike, b: ArrayLike, *, seed: int = 0) -> RankTest:
    """Wilcoxon's signed-rank test (1945) of two methods over paired blocks ``[blocks]``: exact up to 13 blocks, then by random
    signs. Blocks in which both are equal do not count.
    """
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    differences = differences[np.abs(differences) > 1e-12]
    blocks = len(differences)
    if blocks < MINIMUM_BLOCKS:
        reason = f"{counted(blocks, 'seed')} differ; the test needs at least {MINIMUM_BLOCKS} to reach p < {SIGNIFICANCE:g}"
        return RankTest(None, None, blocks, reason=reason)
    signs = stats.PermutationMethod(n_resamples=9_999, rng=np.random.default_rng(seed))
    found: Any = stats.wilcoxon(differences, method=signs)
    return RankTest(float(found.statistic), float(found.pvalue), blocks)


def friedman(values: ArrayLike, *, seed: int = 0) -> RankTest:
    """Friedman's test (1937) of several methods over blocks, as recommended by Demsar (2006), with the p value by permuting
    methods within blocks, since the chi-square approximation needs more blocks than comparisons have.

    A block is what is independent of the others: a seed, whose budgets share a dense model and much of their training. So
    methods are ranked in every cell, and the mean ranks of a block over its cells are permuted together.

    Args:
        values: ``[blocks, methods]`` or, of blocks of several cells, ``[blocks, cells, methods]``; higher is better.
        seed: of the permutations.
    """
    table = np.asarray(values, dtype=float)
    blocks, methods = table.shape[0], table.shape[-1]
    if not table.size:
        return RankTest(None, None, blocks, reason="no seed has all methods")
    ranks = stats.rankdata(-table, axis=-1).reshape(blocks, -1, methods).mean(axis=1)
    average = tuple(float(rank) for rank in ranks.mean(axis=0))
    if methods < 3 or blocks < MINIMUM_BLOCKS:
        reason = f"{counted(methods, 'method')} and {counted(blocks, 'seed')}; "
        return RankTest(None, None, blocks, average, f"{reason}the test needs at least 3 methods and {MINIMUM_BLOCKS} seeds")
    # Friedman's statistic, tie-corrected; permutations leave the denominator as it is.
    spread = np.square(ranks - (methods + 1) / 2).sum() / (blocks * (methods - 1))
    random, draws = np.random.default_rng(seed), 9_999

    def statistic(permuted: Array) -> Array:
        sums: Array = np.square(permuted.mean(axis=-2) - (methods + 1) / 2).sum(axis=-1)
        return blocks * sums / spread if spread > 0 else np.zeros_like(sums)

    observed = float(statistic(ranks))
    permuted = np.stack([random.permuted(ranks, axis=1) for _ in range(draws)])
    as_far = int((statistic(permuted) >= observed - 1e-9).sum())
    return RankTest(observed, (as_far + 1) / (draws + 1), blocks, average)


# -- agreement -----------------------------------------------------------------------------------------------------


def chance_jaccard(kept_a: int | Sequence[int], kept_b: int | Sequence[int], heads: int | Sequence[int]) -> float:
    """The expected Jaccard index of two independent random masks of these sizes, exactly.

    The heads that two masks of ``a`` and ``b`` of ``n`` heads share are hypergeometric, so it is the mean of
    ``i / (a + b - i)``. Given one number for each group of heads (kinds or layers, each with a quota of its own), it is that
    of masks which are random within every group.

    Args:
        kept_a, kept_b: heads that each mask keeps.
        heads: in the model.
    """
    groups = [np.atleast_1d(np.asarray(part, dtype=int)) for part in (kept_a, kept_b, heads)]
    if len({len(part) for part in groups}) != 1 or any(
        not 0 <= min(a, b) <= max(a, b) <= n for a, b, n in zip(*groups, strict=True)
    ):
        raise GateError(f"masks keep {kept_a} and {kept_b} of {heads} heads; expected from none to all of them")
    shared = np.ones(1)
    for a, b, size in zip(*groups, strict=True):
        shared = np.convolve(shared, stats.hypergeom.pmf(np.arange(min(a, b) + 1), size, a, b))
    union = groups[0].sum() + groups[1].sum() - np.arange(len(shared))
    if union.max() == 0:
        return 1.0  # two empty masks agree, as in gates.scores.ranking.jaccard
    return float((shared * np.arange(len(shared)) / union).sum())


def rank_correlations(scores: ArrayLike, other: ArrayLike) -> tuple[float, float]:
    """Kendall's tau-b and Spearman's rho of two score vectors ``[heads]``; NaN if one of them is constant."""
    pair = np.asarray(scores, dtype=float), np.asarray(other, dtype=float)
    if any(np.ptp(values) == 0 or np.isnan(values).any() for values in pair):
        return np.nan, np.nan
    return float(stats.kendalltau(*pair).statistic), float(stats.spearmanr(*pair).statistic)
