"""The test over seeds and examples against tests that know one source of chance alone, and its coverage over both."""

import numpy as np
import pytest
from scipy import stats

from training.stats.bootstrap import MeanMetric, resample_metric
from training.stats.significance import SEEDS_FOR_A_CLAIM, crossed_difference, paired_difference

MEAN = MeanMetric(lambda predictions, targets: np.asarray(predictions)[..., None], lambda means: means[..., 0])
"""Of outcomes that are numbers, so that either source of chance can be the only one."""


def paired(a, b, metric=MEAN, *, targets=0, resamples=4000):
    true = np.broadcast_to(targets, a.shape[1])
    values, draws = resample_metric(np.concatenate([a, b]), true, metric, resamples=resamples)
    seeds = len(a)
    return paired_difference(values[:seeds], values[seeds:], draws[:, :seeds], draws[:, seeds:], a.shape[1])


@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("shift", [0.0, 1.0, 3.0])
def test_of_pure_seed_noise_it_is_the_paired_t_test(seeds, shift):
    """All examples of a seed are alike."""
    random = np.random.default_rng(seeds)
    first, second = random.normal(shift, 1, (seeds, 1)), random.normal(0, 1, (seeds, 1))
    found = paired(first + np.zeros(50), second + np.zeros(50))
    reference = stats.ttest_rel(first[:, 0], second[:, 0])
    assert found.p == pytest.approx(reference.pvalue, rel=1e-3)
    assert (found.low, found.high) == pytest.approx(tuple(reference.confidence_interval()), rel=1e-3)


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.3])
def test_of_pure_example_noise_it_is_the_paired_test_over_examples(shift):
    """All seeds say the same, so that five are worth no more than one."""
    random = np.random.default_rng(3)
    first, second = random.normal(shift, 1, 400), random.normal(0, 1, 400)
    found = paired(np.tile(first, (5, 1)), np.tile(second, (5, 1)))
    reference = stats.ttest_rel(first, second)
    assert np.log(found.p) == pytest.approx(np.log(reference.pvalue), rel=0.06)
    assert (found.low, found.high) == pytest.approx(tuple(reference.confidence_interval()), rel=0.04, abs=0.006)


def test_of_few_examples_it_is_the_paired_t_test_too():
    """The bootstrap's variance is that of 8 examples divided by 8, and Student's that divided by 7."""
    random = np.random.default_rng(8)
    first, second = random.normal(0.5, 1, 8), random.normal(0, 1, 8)
    found = paired(np.tile(first, (5, 1)), np.tile(second, (5, 1)), resamples=40_000)
    interval = stats.ttest_rel(first, second).confidence_interval()
    assert found.high - found.low == pytest.approx(interval.high - interval.low, rel=0.02)


def test_of_pure_example_noise_of_classes_it_is_mcnemars_test():
    random = np.random.default_rng(4)
    targets = random.integers(2, size=1000)
    first, second = (np.where(random.random(1000) < share, targets, 1 - targets) for share in (0.82, 0.80))
    a, b = int(((first == targets) & (second != targets)).sum()), int(((first != targets) & (second == targets)).sum())
    reference = stats.chi2.sf((a - b) ** 2 / (a + b), 1)  # without Edwards' correction
    assert 0.001 < reference < 0.2
    found = paired(np.tile(first, (6, 1)), np.tile(second, (6, 1)), "accuracy", targets=targets, resamples=40_000)
    assert found.p == pytest.approx(reference, rel=0.1)


@pytest.mark.parametrize("metric", ["f1", "matthews"])
def test_the_variance_over_examples_is_that_of_the_mean_over_seeds(metric):
    """Of metrics that are no means, against resampling by hand."""
    random = np.random.default_rng(5)
    targets = random.integers(3, size=200)
    shape = (5, 200)
    a, b = (np.where(random.random(shape) < 0.7, targets, random.integers(3, size=shape)) for _ in range(2))
    values, draws = resample_metric(np.concatenate([a, b]), targets, metric, resamples=2000)
    differences = []
    for _ in range(1000):
        rows = random.integers(200, size=200)
        again, _ = resample_metric(np.concatenate([a, b])[:, rows], targets[rows], metric, resamples=1)
        differences.append(again[:5].mean() - again[5:].mean())
    found = paired_difference(values[:5], values[5:], draws[:, :5], draws[:, 5:], 200)
    expected = crossed_difference(values[:5] - values[5:], np.var(differences), 200)
    assert found.high - found.low == pytest.approx(expected[2] - expected[1], rel=0.06)


def test_the_squares_of_half_widths_add():
    differences, variance = np.array([0.1, 0.3, 0.2, 0.25, 0.4]), 0.002
    mean, low, high, p = crossed_difference(differences, variance, 30)
    over_seeds = stats.t.ppf(0.975, 4) * stats.sem(differences)
    over_examples = stats.t.ppf(0.975, 29) * variance**0.5
    assert mean == pytest.approx(0.25)
    assert (high - mean, mean - low) == pytest.approx((np.hypot(over_seeds, over_examples),) * 2)
    at_p = crossed_difference(differences, variance, 30, level=1 - p)
    assert at_p[1] == pytest.approx(0, abs=1e-9)  # the interval of level 1 - p just reaches 0


def test_it_takes_many_pairs_at_once_in_either_direction():
    random = np.random.default_rng(6)
    differences, variance = random.normal(0.3, 1, (7, 3, 5)), random.random((7, 3)) / 10
    found, turned = crossed_difference(differences, variance, 50), crossed_difference(-differences, variance, 50)
    single = [float(part) for part in crossed_difference(differences[2, 1], variance[2, 1], 50)]
    assert [float(part[2, 1]) for part in found] == pytest.approx(single)
    for there, back in zip(found, (-turned[0], -turned[2], -turned[1], turned[3]), strict=True):
        np.testing.assert_allclose(there, back)


def test_a_tie_is_no_difference_and_a_difference_without_any_chance_is_one():
    assert crossed_difference(np.zeros(5), 0.0, 10)[3] == 1
    assert crossed_difference(np.full(5, 1e-17), 0.0, 10)[3] == 1  # what rounding leaves of a tie
    assert crossed_difference(np.array([1, -1, 2, -2, 0]) * 0.1, 0.01, 10)[3] == 1
    assert crossed_difference(np.full(5, 0.2), 0.0, 10)[3] < 1e-9


def test_fewer_seeds_than_a_claim_needs_have_no_p_value_and_one_has_the_bootstraps():
    assert SEEDS_FOR_A_CLAIM == 5
    random = np.random.default_rng(7)
    a, b = random.normal(5, 1, (6, 40)), random.normal(0, 1, (6, 40))
    for seeds in (2, 3, 4):
        found = paired(a[:seeds], b[:seeds])
        assert found.difference == pytest.approx((a - b)[:seeds].mean())
        assert np.isnan([found.low, found.high, found.p]).all()
    for seeds in (5, 6):
        assert paired(a[:seeds], b[:seeds]).p < 0.001
    one = paired(a[:1], b[:1], resamples=999)
    assert one.p == pytest.approx(2 / 1000)
    assert one.low < (a[0] - b[0]).mean() < one.high
    single = paired_difference([1.0] * 5, [0.0] * 5, np.ones((9, 5)), np.zeros((9, 5)), 1)
    assert np.isnan(single.p)  # a single example has no spread


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("seeds", [5, 10])
def test_the_interval_covers_the_truth_whatever_the_shares_of_seeds_and_examples(seeds, share):
    """Also in the tails that Holm's correction looks at; with estimated degrees of freedom up to three times too often not."""
    random = np.random.default_rng([seeds, int(10 * share)])
    trials = 8_000
    differences = random.normal(0, ((1 - share) * seeds) ** 0.5, (trials, seeds)) + random.normal(0, share**0.5, (trials, 1))
    p = crossed_difference(differences, share, 10_000)[3]
    for level in (0.05, 0.05 / 28):
        assert (p < level).mean() <= level + 3.5 * (level / trials) ** 0.5
    if share in (0, 1):  # one source alone: exact
        assert (p < 0.05).mean() == pytest.approx(0.05, abs=0.009)
