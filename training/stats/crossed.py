"""The test of two methods over seeds and test examples: what is claimed of how many seeds. Pure functions on arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from training.stats.bootstrap import LEVEL, Array, Difference, resampled_difference

SEEDS_FOR_A_CLAIM = 5
"""Fewer seeds, but for a single one, are described and not tested: of 2 to 4 a spread is hardly known."""
LEAST_P = 1e-12
"""A smaller p is not told from 0."""


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
