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
"""The level below which p is called significant."""
MINIMUM_BLOCKS = 6
"""Fewer non-zero paired differences cannot reach p < 0.05: the exact two-sided Wilcoxon p is at least 2 / 2^blocks."""


class Interval(NamedTuple):
    """Mean, standard deviation (n - 1) and confidence interval of the mean over seeds."""

    mean: float
    std: float
    low: float
    high: float
    seeds: int


def interval(values: ArrayLike, level: float = LEVEL, *, bounds: tuple[float, float] | None = None) -> Interval:
    """Return the mean over seeds with Student's t interval, right for few values of a normal spread; one value has none (NaN).

    A metric with bounds has the logit interval of Korn and Graubard (1998), as in Stata's ``proportion``. It is the interval of
    the log odds of the mean, by the delta method, transformed back. Near a bound the plain interval would reach beyond it, and
    clipping would put all of its error on the other side. The log odds of the mean are used, not the mean of log odds, because
    a seed may lie on the bound. A metric with a lower bound alone uses the logarithm of the distance from it.

    Args:
        bounds: The least and the largest possible value of the metric.
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


def mcnemar(correct_a: ArrayLike, correct_b: ArrayLike) -> float:
    """Return p of the exact McNemar test (1947) of two systems on the same examples, from booleans ``[examples]``.

    It is the two-sided binomial p of the examples that only one of them gets right; 1 if there is none.
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
        statistic, p: The result; None with too few blocks.
        average_ranks: The rank of each method (1 is best); empty for the Wilcoxon test.
    """

    statistic: float | None
    p: float | None
    blocks: int
    average_ranks: tuple[float, ...] = ()
    reason: str = ""


def wilcoxon(a: ArrayLike, b: ArrayLike, *, seed: int = 0) -> RankTest:
    """Compare two methods over paired blocks ``[blocks]`` by Wilcoxon's signed-rank test (1945).

    The test is exact up to 13 blocks, then by random signs. Blocks in which both are equal do not count.
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
    """Compare several methods over blocks by Friedman's test (1937), as recommended by Demsar (2006).

    p comes from permuting methods within blocks, because the chi-square approximation needs more blocks. A block is a seed: its
    budgets share a dense model and much of their training. So methods are ranked in every cell, and the mean ranks of a block
    over its cells are permuted together.

    Args:
        values: The values ``[blocks, methods]`` or ``[blocks, cells, methods]``; higher is better.
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
    # Friedman's statistic, tie-corrected; permutations do not change the denominator.
    spread = np.square(ranks - (methods + 1) / 2).sum() / (blocks * (methods - 1))
    random, draws = np.random.default_rng(seed), 9_999

    def statistic(permuted: Array) -> Array:
        sums: Array = np.square(permuted.mean(axis=-2) - (methods + 1) / 2).sum(axis=-1)
        return blocks * sums / spread if spread > 0 else np.zeros_like(sums)

    observed = float(statistic(ranks))
    permuted = np.stack([random.permuted(ranks, axis=1) for _ in range(draws)])
    as_far = int((statistic(permuted) >= observed - 1e-9).sum())
    return RankTest(observed, (as_far + 1) / (draws + 1), blocks, average)


def chance_jaccard(kept_a: int | Sequence[int], kept_b: int | Sequence[int], heads: int | Sequence[int]) -> float:
    """Return the exact expected Jaccard index of two independent random masks that keep ``kept_a`` and ``kept_b`` heads.

    The number ``i`` of shared heads is hypergeometric, and the index is the mean of ``i / (a + b - i)``. With one number for
    each group of heads (kinds or layers with quotas), masks are random within every group.
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
    """Return Kendall's tau-b and Spearman's rho of two score vectors ``[heads]``; NaN if one of them is constant."""
    pair = np.asarray(scores, dtype=float), np.asarray(other, dtype=float)
    if any(np.ptp(values) == 0 or np.isnan(values).any() for values in pair):
        return np.nan, np.nan
    return float(stats.kendalltau(*pair).statistic), float(stats.spearmanr(*pair).statistic)


# The test of two methods over seeds and test examples. Pure functions on arrays.

SEEDS_FOR_A_CLAIM = 5
"""The number of seeds for a test. 2 to 4 seeds are described, not tested, because their spread is hardly known."""


def paired_difference(
    a: ArrayLike, b: ArrayLike, replicates_a: ArrayLike, replicates_b: ArrayLike, examples: int, *, level: float = LEVEL
) -> Difference:
    """Return the difference of two methods over paired seeds, with the test that the number of seeds allows.

    One seed: the paired bootstrap over test examples (:func:`training.stats.bootstrap.resampled_difference`), about these two
    models only. 2 to 4 seeds, or a single example: no interval and no p value (NaN). :data:`SEEDS_FOR_A_CLAIM` and more:
    :func:`crossed_difference` with the bootstrap's variance of the mean over seeds, with the same examples for all seeds.

    Args:
        a, b: The values of a metric ``[seeds]``, in the same order of seeds.
        replicates_a, replicates_b: The values on resamples of examples ``[resamples, seeds]``, from
            :func:`training.stats.bootstrap.resample_metric`.
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
    """Return mean, lower end, upper end and p ``[...]`` of a difference that varies with seeds and with test examples.

    Every seed is tested on every example, so there are two shared sources of chance (Clark 1973; Owen 2007). Another seed
    changes the results on all examples; another test set changes those of all seeds. Each has an interval by Student's t, and
    the squares of their half-widths add (Banerjee 1960):

        half(p)^2 = t(p, seeds - 1)^2 * V_seeds + t(p, examples - 1)^2 * V_examples

    For any two variances, the interval of normal differences covers the truth at least at its level. The degrees of freedom are
    not estimated: Satterthwaite's rule is too sure in the tails that Holm's correction uses. With one source alone it is the
    plain t interval. The interaction of seeds and examples is in both variances, which errs towards no claim. p belongs to the
    interval that just reaches 0.

    Args:
        differences: The differences of a metric between two methods ``[..., seeds]``, at least 2 seeds.
        variance: The variance of their mean over the choice of examples ``[...]``.
        examples: The number of examples, at least 2.
    """
    sample = np.asarray(differences, dtype=float)
    seeds, mean = sample.shape[-1], sample.mean(axis=-1)
    mean = np.where(np.abs(mean) < 1e-12, 0.0, mean)  # ties, but for rounding
    over_seeds = sample.var(axis=-1, ddof=1) / seeds
    over_examples = np.broadcast_to(np.asarray(variance, dtype=float), mean.shape)

    def half_width(p: Array | float) -> Array:
        parts = stdtrit(seeds - 1, p / 2) ** 2 * over_seeds + stdtrit(examples - 1, p / 2) ** 2 * over_examples
        return np.asarray(np.sqrt(parts))

    low, high = np.full(mean.shape, np.log(1e-12)), np.zeros(mean.shape)  # the least p
    for _ in range(32):  # bisection of log p: the larger p, the narrower the interval
        middle = (low + high) / 2
        reaches = half_width(np.exp(middle)) >= np.abs(mean)
        low, high = np.where(reaches, middle, low), np.where(reaches, high, middle)
    half = half_width(1 - level)
    return mean, mean - half, mean + half, np.exp(high)


# Odds ratios of two-by-two tables, of one table exactly and over seeds. Pure functions on counts.


class Table(NamedTuple):
    """The numbers of kept and removed members of two groups."""

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
    """Count kept and closed heads among the specialised and the others."""
    kept = mask > 0
    return Table(*(int((group & state).sum()) for group in (special, ~special) for state in (kept, ~kept)))


def exact_odds(table: Table) -> Odds:
    """Return the conditional maximum-likelihood odds ratio with the exact interval (Fisher 1935; Cornfield 1956).

    It is NaN if all or nothing is kept, or a group is empty, because the margins then leave one table alone.
    """
    cells = np.array(table).reshape(2, 2)
    if 0 in cells.sum(0) or 0 in cells.sum(1):
        return Odds(np.nan, np.nan, np.nan)
    found = odds_ratio(cells, kind="conditional")
    low, high = found.confidence_interval(LEVEL)
    return Odds(float(found.statistic), float(low), float(high))


def log_odds(table: Table) -> float:
    """Return the log odds ratio with one half added to every cell (Haldane 1956; Anscombe 1956); NaN as above."""
    cells = np.array(table, dtype=float).reshape(2, 2)
    if 0 in cells.sum(0) or 0 in cells.sum(1):
        return float("nan")
    cells += 0.5
    return float(np.log(cells[0, 0] * cells[1, 1] / (cells[0, 1] * cells[1, 0])))


def pooled_odds(tables: Sequence[Table]) -> Odds:
    """Return the exact odds ratio of one seed, or the mean of log odds with Student's interval over several seeds.

    Seeds are the units, because heads of one mask are not independent. Equal seeds have no interval.
    """
    if len(tables) == 1:
        return exact_odds(tables[0])
    return _exponential([log_odds(table) for table in tables])


def ratio_of_odds(tables: Sequence[Table], others: Sequence[Table]) -> Odds:
    """Return the factor between the odds ratios of two methods at the same seeds, with Student's interval of log odds."""
    return _exponential([log_odds(one) - log_odds(other) for one, other in zip(tables, others, strict=True)])


def _exponential(values: Sequence[float]) -> Odds:
    known = [value for value in values if np.isfinite(value)]
    if not known:
        return Odds(np.nan, np.nan, np.nan)
    found = interval(known)
    if found.std == 0:  # equal counts at a few seeds give no certainty
        return Odds(float(np.exp(found.mean)), np.nan, np.nan)
    return Odds(*(float(np.exp(value)) for value in (found.mean, found.low, found.high)))
