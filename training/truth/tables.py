"""What ``truth.csv`` says of methods and of programs, as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from training.truth.survival import smallest_budgets, with_program

TICK, CROSS = "✓", "✗"
COLUMNS = ("seed", "method", "budget", "needed", "recall", "precision", "exact", "survives")
"""Of ``truth.csv`` that the tables need."""
OF_FACTS = ("seed", "method", "budget", "carried", "at_best", "recall")
"""Of ``interchange.csv``."""


def ticks(truth: pd.DataFrame) -> pd.DataFrame:
    """What each method found where the budget is the number of necessary functions: one row per program (or a single one), one
    column per method. A tick where it found exactly the necessary heads in all seeds, a cross where in none, otherwise in how
    many."""
    at_needed = with_program(truth[truth["budget"] == truth["needed"]])
    found = at_needed.groupby(["program", "method"], sort=False)["exact"].agg(["sum", "size"])
    found["cell"] = [_cell(int(exact), int(seeds)) for exact, seeds in zip(found["sum"], found["size"], strict=True)]
    return _wide(found["cell"], at_needed)


def summary_of_truth(truth: pd.DataFrame) -> pd.DataFrame:
    """One row per method over all programs: precision, recall and exact recovery where the budget is the number of necessary
    functions, and how many heads more than that the function needs to survive in the masks of this method.

    Returns:
        ``method``; ``exact``, ``recall`` and ``precision``, means over programs and seeds; ``survives``, share at this budget;
        ``spare``, the mean over those programs and seeds in which the function survives at one of the budgets; ``lost``, the
        share in which it survives at none.
    """
    whole = with_program(truth)
    rows = []
    for method, of_method in whole.groupby("method", sort=False):
        at_needed = of_method[of_method["budget"] == of_method["needed"]]
        smallest = smallest_budgets(of_method)
        rows.append(
            {
                "method": method, "exact": at_needed["exact"].mean(), "recall": at_needed["recall"].mean(),
                "precision": at_needed["precision"].mean(), "survives": at_needed["survives"].mean(),
                "spare": (smallest["smallest"] - smallest["needed"]).mean(), "lost": smallest["smallest"].isna().mean(),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def as_markdown(truth: pd.DataFrame) -> str:
    """Ticks and summary as two tables."""
    return f"{by_program(truth)}\n\n{by_method(truth)}\n"


def by_program(truth: pd.DataFrame) -> str:
    """:func:`ticks` as a Markdown table."""
    return _table(ticks(truth).reset_index())


def by_method(truth: pd.DataFrame) -> str:
    """:func:`summary_of_truth` as a Markdown table."""
    return _table(summary_of_truth(truth))


def by_facts(carried: pd.DataFrame) -> str:
    """What ``interchange.csv`` says, as a Markdown table: for each method and budget what a mask keeps of the effects of all
    heads, as a share of what the best mask with as many heads keeps, mean and standard deviation over seeds; and the mean share
    of the carriers that it keeps."""
    shares = carried.assign(share=carried["carried"] / carried["at_best"])
    budgets = sorted(shares["budget"].unique(), reverse=True)
    rows = []
    for method, of_method in shares.groupby("method", sort=False):
        at = {budget: of_method[of_method["budget"] == budget] for budget in budgets}
        kept = {f"share, {budget} heads": _spread(found["share"]) for budget, found in at.items()}
        recall = {f"carriers, {budget} heads": found["recall"].mean() for budget, found in at.items()}
        rows.append({"method": method} | kept | recall)
    return _table(pd.DataFrame(rows))


def _spread(values: pd.Series) -> str:
    return f"{values.mean():.2f} ± {values.std():.2f}" if len(values) > 1 else f"{values.mean():.2f}"


def _cell(exact: int, seeds: int) -> str:
    return TICK if exact == seeds else CROSS if exact == 0 else f"{exact}/{seeds}"


def _wide(cells: pd.Series, at_needed: pd.DataFrame) -> pd.DataFrame:
    methods, programs = at_needed["method"].unique(), at_needed["program"].unique()
    return cells.unstack("method").reindex(index=pd.Index(programs, name="program"), columns=methods)


def _table(frame: pd.DataFrame) -> str:
    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{value:.2f}"
        return str(value)

    rows: Sequence[Sequence[Any]] = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(text, row))} |" for row in rows)
