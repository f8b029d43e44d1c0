"""Estimates over heads against SciPy, against loops, and against what they are estimates of."""

import numpy as np
import pytest
from scipy import stats

from training.stats.heads import LEAST_HEADS, estimate, head_draws, shares, spearman, superiority

RANDOM = np.random.default_rng(3)


def test_spearman_is_that_of_scipy_in_every_resample():
    first, second = RANDOM.normal(size=(2, 12)).round(1), RANDOM.normal(size=(2, 12))
    found, draws = spearman(first, second), head_draws(12)
    for place in (0, 1, 77):
        own = [stats.spearmanr(x[draws[place]], y[draws[place]]).statistic for x, y in zip(first, second, strict=True)]
        assert found[place] == pytest.approx(np.mean(own))


def test_superiority_is_mann_and_whitneys_statistic_in_every_resample():
    values = np.array([[0.1, np.inf, 0.3, 0.3, 0.2, np.inf, 0.0], [3, 2, 1, 1, 2, 3, 0]])
    members = np.array([[1, 1, 0, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0]], dtype=bool)
    found, draws = superiority(values, members), head_draws(7)
    compared = 0
    for place in (0, 1, 2, 3, 50):
        own = []
        for row, group in zip(values, members, strict=True):
            inside, outside = row[draws[place]][group[draws[place]]], row[draws[place]][~group[draws[place]]]
            if len(inside) and len(outside):
                own.append(stats.mannwhitneyu(stats.rankdata(np.concatenate([inside, outside]))[: len(inside)],
                                              stats.rankdata(np.concatenate([inside, outside]))[len(inside) :]).statistic
                           / len(inside) / len(outside))  # fmt: skip
        if len(own) == 2:
            compared += 1
            assert found[place] == pytest.approx(np.mean(own))
        else:
            assert np.isnan(found[place])
    assert compared >= 3


def test_no_group_no_number_and_few_heads_no_interval():
    assert np.isnan(superiority(np.arange(4.0), np.zeros(4, dtype=bool))).all()
    assert np.isnan(spearman(np.ones(6), np.arange(6.0))).all()
    found = estimate(superiority(np.arange(12.0), np.arange(12) > 12 - LEAST_HEADS), LEAST_HEADS - 1)
    assert found.value == 1
    assert np.isnan(found.low)
    assert found.sure == ""


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Two normal groups a standard deviation apart: the larger one is ahead in 76 % of all pairs."""
    truth, held, tries = stats.norm.cdf(2**-0.5), 0, 100
    members = np.arange(40) < 16
    for _ in range(tries):
        values = RANDOM.normal(size=40) + members
        found = estimate(superiority(values, members), 16)
        held += found.low <= truth <= found.high
    assert held >= 87  # 95 by right; 3.6 standard errors


def test_shares_over_a_group():
    values = RANDOM.random((9, 4))
    members = np.arange(9) < 6
    mean, low, high = shares(values, members)
    np.testing.assert_allclose(mean, values[:6].mean(0))
    assert (low < mean).all()
    assert (mean < high).all()
    assert np.isnan(shares(values, np.arange(9) < 2)[1:]).all()
