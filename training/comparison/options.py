"""Budgets of a comparison against the model that is pruned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gates.budget import Budget
from gates.errors import GateError
from training.config import BudgetOption


def check_budgets(budgets: Sequence[BudgetOption], sizes: Mapping[str, int]) -> None:
    """Raises :class:`GateError` for two budgets of equally many heads, or one of none or of all.

    Args:
        budgets: as the command line has them.
        sizes: heads of each kind in the model.
    """
    totals = [Budget.parse(value, sizes).total for value in budgets]
    for index, total in enumerate(totals):
        if total in totals[:index]:
            same = f"{budgets[totals.index(total)]} and {budgets[index]}"
            raise GateError(
                f"--budgets has {same}, which both keep {total} heads in all, or a time at most; tables tell budgets by this "
                "number, so give each number once, or make a comparison of each"
            )
        if total in (0, sum(sizes.values())):
            raise GateError(f"--budgets has {budgets[index]!r}, which is {total} heads; nothing can be compared there")
