"""Intervals over seeds, tests, corrections for their number, and agreement of masks and rankings. Pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.special import expit, logit, stdtrit
from scipy.stats.contingency import odds_ratio

from gates.errors import GateError
from training.stats.bootstrap import LEVEL, Array, Difference, resampled_difference
from training.stats.numbers import counted

SIGNIFICANCE = 0.05
"""Below it p is called significant."""
MINIMUM_BLOCKS = 6
"""Fewer non-zero paired differences cannot reach p < 0.05: the exact two-sided Wilcoxon p is at least 2 / 2^blocks."""


# -- over seeds ------------------------------------------------------------------------------------------------


class Interval(NamedTuple):
    """Mean, standard deviation (n - 1) and confidence interval of the mean over seeds."""

    mean: float
    std: float
    low: float
    high: float
    seeds: int


def interval(values: ArrayLike, level: float = LEVEL, *, bounds: tuple[float, float] | None = None) -> Interval:
    """Return the mean over seeds with Student's t interval, right for few values of a normal spread; one value has none (NaN).

    Of a metric with bounds it is that of the log odds of the mean, by the delta method, brought back (the logit interval of
    Korn and Graubard 1998, the one that Stata's ``proportion`` states). With few seeds and means near a bound the plain
    interval would reach beyond it, and a clipped one would put all of its error on the other side. Log odds of the mean, not
    the mean of log odds: a seed may lie on the bound. Where there is a least value alone, the logarithm of the distance from it
    is in their place.

    Args:
        values: ``[seeds]``.
        level: of confidence.
        bounds: least and largest value that the metric can take; None for a metric without.
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
    """Return p of the exact McNemar test (1947) of two systems on the same examples.

    It is the two-sided binomial p of the examples that only one of them gets right; 1 if there is none.

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
    """Return p values corrected for their number by Holm's step-down method (1979), in their order ``[tests]``."""
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


# The test of two methods over seeds and test examples: what is claimed of how many seeds. Pure functions on arrays.

SEEDS_FOR_A_CLAIM = 5
"""Fewer seeds, but for a single one, are described and not tested: of 2 to 4 a spread is hardly known."""
LEAST_P = 1e-12
"""Smaller p values count as it."""


def paired_difference(
    a: ArrayLike, b: ArrayLike, replicates_a: ArrayLike, replicates_b: ArrayLike, examples: int, *, level: float = LEVEL
) -> Difference:
    """The difference of two methods over paired seeds, and as much of a test as so many seeds allow.

    One seed: the paired bootstrap over test examples (:func:`training.stats.bootstrap.resampled_difference`), which is of these
    two models alone. 2 to 4 seeds, or a single example: no interval and no p value (NaN). :data:`SEEDS_FOR_A_CLAIM` and more:
    :func:`crossed_difference` with the variance that the bootstrap finds of the mean over seeds, the same examples drawn for
    all of them.

    Args:
        a, b: values of a metric ``[seeds]``, the same seeds in the same order.
        replicates_a, replicates_b: the same on resamples of examples ``[resamples, seeds]``, as
            :func:`training.stats.bootstrap.resample_metric` draws them.
        examples: on which the metric is measured.
        level: of the interval.
    """
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    replicates = np.asarray(replicates_a) - np.asarray(replicates_b)
    if examples < 2 or 1 < len(differences) < SEEDS_FOR_A_CLAIM:
        return Difference(float(differences.mean()), np.nan, np.nan, np.nan)
    if len(differences) == 1:
        return resampled_difference(float(differences[0]), replicates[:, 0], level=level)
    # The bootstrap's variance is that of E examples divided by E, Student's t needs E - 1.
    variance = replicates.mean(axis=1).var(ddof=1) * examples / (examples - 1)
    return Difference(*map(float, crossed_difference(differences, variance, examples, level=level)))


def crossed_difference(
    differences: ArrayLike, variance: ArrayLike, examples: int, *, level: float = LEVEL
) -> tuple[Array, Array, Array, Array]:
    """Mean, interval and two-sided p value of a difference that varies with the seeds and with the test examples.

    Every seed is tested on every example, so there are two sources of chance, both shared: another seed changes the results on
    all examples, another test set those of all seeds (Clark 1973; Owen 2007). Either has its interval by Student's t, over
    seeds and over examples, and the squares of their half-widths add (Banerjee 1960):

        half(p)^2 = t(p, seeds - 1)^2 * V_seeds + t(p, examples - 1)^2 * V_examples

    Whatever the two variances are, the interval of normal differences holds the truth at least as often as it says: the
    degrees of freedom are not estimated, as by Satterthwaite's rule, which is too sure in the tails that Holm's correction
    looks at. With one source alone it is the plain t interval. What seeds and examples do together is in both variances, which
    errs towards no claim. p is that of the interval which just reaches 0.

    Args:
        differences: of a metric between two methods for each seed ``[..., seeds]``, at least 2.
        variance: of their mean by the choice of examples ``[...]``.
        examples: on which the metric is measured, at least 2.
        level: of the interval.

    Returns:
        Means, lower ends, upper ends and p values, each ``[...]``.
    """
    sample = np.asarray(differences, dtype=float)
    seeds, mean = sample.shape[-1], sample.mean(axis=-1)
    mean = np.where(np.abs(mean) < 1e-12, 0.0, mean)  # what rounding leaves of a tie
    over_seeds = sample.var(axis=-1, ddof=1) / seeds
    over_examples = np.broadcast_to(np.asarray(variance, dtype=float), mean.shape)

    def half_width(p: Array | float) -> Array:
        parts = stdtrit(seeds - 1, p / 2) ** 2 * over_seeds + stdtrit(examples - 1, p / 2) ** 2 * over_examples
        return np.asarray(np.sqrt(parts))

    low, high = np.full(mean.shape, np.log(LEAST_P)), np.zeros(mean.shape)
    for _ in range(32):  # bisection of log p: the larger p, the narrower the interval
        middle = (low + high) / 2
        reaches = half_width(np.exp(middle)) >= np.abs(mean)
        low, high = np.where(reaches, middle, low), np.where(reaches, high, middle)
    half = half_width(1 - level)
    return mean, mean - half, mean + half, np.exp(high)


# Odds ratios of two-by-two tables, of one table exactly and over seeds. Pure functions on counts.


class Table(NamedTuple):
    """What of two groups was kept and what was not."""

    kept: int
    gone: int
    other_kept: int
    other_gone: int


class Odds(NamedTuple):
    """An odds ratio with its 95 % interval; NaN where there is none."""

    ratio: float
    low: float
    high: float


def cross_table(mask: NDArray[np.float64], special: NDArray[np.bool_]) -> Table:
    """Kept and closed heads among the specialised and the others."""
    kept = mask > 0
    return Table(*(int((group & state).sum()) for group in (special, ~special) for state in (kept, ~kept)))


def exact_odds(table: Table) -> Odds:
    """The conditional maximum-likelihood odds ratio with the exact interval (Fisher 1935; Cornfield 1956); NaN where all or
    nothing is kept, or a group is empty, since the margins then leave one table alone."""
    cells = np.array(table).reshape(2, 2)
    if 0 in cells.sum(0) or 0 in cells.sum(1):
        return Odds(np.nan, np.nan, np.nan)
    found = odds_ratio(cells, kind="conditional")
    low, high = found.confidence_interval(LEVEL)
    return Odds(float(found.statistic), float(low), float(high))


def log_odds(table: Table) -> float:
    """The logarithm of the odds ratio with one half added to every cell (Haldane 1956; Anscombe 1956); NaN as above."""
    cells = np.array(table, dtype=float).reshape(2, 2)
    if 0 in cells.sum(0) or 0 in cells.sum(1):
        return float("nan")
    cells += 0.5
    return float(np.log(cells[0, 0] * cells[1, 1] / (cells[0, 1] * cells[1, 0])))


def pooled_odds(tables: Sequence[Table]) -> Odds:
    """Of one seed the exact odds ratio; of several the mean of their log odds, with Student's interval: a seed is the unit, as
    heads of one mask are not independent of each other. There is no interval where all seeds are alike."""
    if len(tables) == 1:
        return exact_odds(tables[0])
    return _exponential([log_odds(table) for table in tables])


def ratio_of_odds(tables: Sequence[Table], others: Sequence[Table]) -> Odds:
    """By how much the odds ratio of one method exceeds another's at the same seeds, as a factor: the mean of the differences of
    log odds, with Student's interval; without one of a single seed."""
    return _exponential([log_odds(one) - log_odds(other) for one, other in zip(tables, others, strict=True)])


def _exponential(values: Sequence[float]) -> Odds:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return Odds(np.nan, np.nan, np.nan)
    found = interval(known)
    if found.std == 0:  # equal counts at a few seeds do not make it certain
        return Odds(float(np.exp(found.mean)), np.nan, np.nan)
    return Odds(*(float(np.exp(value)) for value in (found.mean, found.low, found.high)))
