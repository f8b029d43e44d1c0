"""Odds ratios against formulas and other implementations."""

import math

import numpy as np
import pytest
from scipy import stats

from training.stats.significance import Table, exact_odds, log_odds, pooled_odds, ratio_of_odds


def test_the_exact_interval_ends_where_fishers_test_turns():
    found = exact_odds(Table(8, 4, 5, 15))
    kept, group, total = 13, 12, 32
    for bound, tail in ((found.low, "sf"), (found.high, "cdf")):
        noncentral = stats.nchypergeom_fisher(total, kept, group, bound)
        assert (noncentral.sf(7) if tail == "sf" else noncentral.cdf(8)) == pytest.approx(0.025, rel=1e-3)
    assert stats.nchypergeom_fisher(total, kept, group, found.ratio).mean() == pytest.approx(8, rel=1e-4)


def test_zero_cells_and_margins_that_leave_no_choice():
    assert math.isinf(exact_odds(Table(5, 0, 5, 5)).high)
    for table in (Table(5, 0, 5, 0), Table(0, 5, 0, 5), Table(0, 0, 5, 5)):
        assert math.isnan(exact_odds(table).ratio)
        assert math.isnan(log_odds(table))
    assert log_odds(Table(5, 0, 5, 5)) == pytest.approx(math.log(5.5 * 5.5 / (0.5 * 5.5)))


def test_seeds_are_the_unit_of_several():
    tables = [Table(8, 4, 5, 15), Table(7, 5, 6, 14), Table(9, 3, 4, 16)]
    logs = np.array([log_odds(table) for table in tables])
    half = stats.t.ppf(0.975, 2) * logs.std(ddof=1) / 3**0.5
    found = pooled_odds(tables)
    np.testing.assert_allclose(np.log(found), [logs.mean(), logs.mean() - half, logs.mean() + half])
    assert pooled_odds(tables[:1]) == exact_odds(tables[0])
    others = [Table(6, 6, 7, 13)] * 3
    factor = ratio_of_odds(tables, others)
    assert factor.ratio == pytest.approx(math.exp(logs.mean() - log_odds(others[0])))
    assert math.isnan(ratio_of_odds(tables[:1], others[:1]).low)
    assert math.isnan(ratio_of_odds([Table(0, 0, 5, 5)], others[:1]).ratio)
    alike = pooled_odds(others)
    assert alike.ratio == pytest.approx(math.exp(log_odds(others[0])))
    assert math.isnan(alike.low)  # three equal tables do not make it certain
