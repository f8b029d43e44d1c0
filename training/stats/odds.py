"""Odds ratios of two-by-two tables, of one table exactly and over seeds. Pure functions on counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats.contingency import odds_ratio

from training.stats.bootstrap import LEVEL
from training.stats.significance import interval


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
