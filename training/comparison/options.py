"""Budgets of a comparison against the model that is pruned."""

from __future__ import annotations

from collections.abc import Sequence

from gates.budget import Budget
from gates.errors import GateError
from training.config import BudgetOption


def check_budgets(options: Sequence[BudgetOption], budgets: Sequence[Budget], heads: int) -> None:
    """Raise an error for two budgets of equally many heads, or one of none or of all.

    Args:
        options: The budgets as the command line has them.
        budgets: The same, parsed.
        heads: The heads of the model.
    """
    totals = [budget.total for budget in budgets]
    for index, total in enumerate(totals):
        if total in totals[:index]:
            same = f"{options[totals.index(total)]} and {options[index]}"
            raise GateError(
                f"--budgets has {same}, which both keep {total} heads in all, or a time at most; tables tell budgets by this "
                "number, so give each number once, or make a comparison of each"
            )
        if total in (0, heads):
            raise GateError(f"--budgets has {options[index]!r}, which is {total} heads; nothing can be compared there")
