"""What is to be reached, and whether it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]
REACHED: dict[str, Callable[[float, float], bool]] = {"at most": operator.le, "at least": operator.ge}


@dataclass(frozen=True)
class Goal:
    """A bound that every row of a part is to keep.

    Args:
        text: what is bounded.
        column: of the rows, a number or a spread, whose median counts; rows that have none do not.
        bound: the number.
        sense: which side of it is good.
        where: values that rows have which are meant, by column; all by default.
        device: that the goal is of; any by default.
    """

    text: str
    column: str
    bound: float
    sense: Literal["at most", "at least"] = "at most"
    where: tuple[tuple[str, Any], ...] = ()
    device: str | None = None


@dataclass(frozen=True)
class Judged:
    """A goal beside what was measured.

    Args:
        goal: that was to be reached.
        worst: of all rows; None where none was measured.
        rows: that were judged.
        reached: how many of them keep the bound.
        undecided: how many have quartiles on both sides of it, so that another run could say otherwise.
    """

    goal: Goal
    worst: float | None
    rows: int
    reached: int
    undecided: int

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` or ``not measured``."""
        if self.worst is None:
            return "not measured"
        return "met" if self.reached == self.rows else "missed"


def judge(goals: Sequence[Goal], rows: Sequence[Row], device: str) -> list[Judged]:
    """Every goal of a device, also those of which nothing was measured.

    >>> goal = Goal("a step", "ratio", 1.02)
    >>> [judged] = judge([goal], [{"ratio": {"median": 1.0, "low": 0.9, "high": 1.1}}, {"ratio": 1.3}, {"ratio": None}], "cpu")
    >>> judged.worst, judged.reached, judged.rows, judged.undecided, judged.verdict
    (1.3, 1, 2, 1, 'missed')
    """
    found = []
    for goal in goals:
        if goal.device not in (None, device):
            continue
        chosen = [row for row in rows if all(row.get(column) == value for column, value in goal.where)]
        values = [value for row in chosen if (value := number(row.get(goal.column))) is not None]
        reached = sum(REACHED[goal.sense](value, goal.bound) for value in values)
        undecided = sum(_straddles(row.get(goal.column), goal.bound) for row in chosen)
        worst = (max if goal.sense == "at most" else min)(values, default=None)
        found.append(Judged(goal, worst, len(values), reached, undecided))
    return found


def _straddles(cell: Any, bound: float) -> bool:
    """Whether a bound lies between the quartiles of a cell; of a number alone that is not known."""
    return isinstance(cell, Mapping) and cell["low"] <= bound < cell["high"]


def number(cell: Any) -> float | None:
    """A number of a table, the median of a spread; None for what is neither."""
    value = cell.get("median") if isinstance(cell, Mapping) else cell
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
