"""What methods cost, as columns of a table: examples that pass the model, to select heads and to retrain with them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from gates.errors import GateError
from training.config.stages import POST_HOC

DIRECTIONS = ("forward", "backward")
COLUMNS = [f"{work}, {direction}" for work in ("selection", "retraining") for direction in DIRECTIONS]
NOTE = (
    "Costs are thousands of examples that pass the model forwards and backwards, means over seeds; where budgets differ, from "
    "the most heads to the fewest"
)


def split_costs(rows: pd.DataFrame) -> pd.DataFrame:
    """The examples of each row by work and direction, ``[rows]`` in the columns of :data:`COLUMNS`; NaN where nobody counted.

    A table of an earlier version has the sum alone. There the row of the same budget with nothing trained says what selecting
    heads cost; a search on other weights than that row's may have cost a little more or less.

    Args:
        rows: of a comparison, with ``seed``, ``stage``, ``method``, ``heads`` and ``kinds``.
    """
    cell = ["seed", "method", "heads", "kinds"]
    found: dict[str, pd.Series] = {}
    for direction in DIRECTIONS:
        total, selection = _column(rows, f"{direction}_examples"), _column(rows, f"selection_{direction}_examples")
        untrained = rows[cell].assign(cost=total)[rows["stage"] == POST_HOC].drop_duplicates(cell)
        selection = selection.fillna(rows[cell].merge(untrained, on=cell, how="left").set_axis(rows.index)["cost"])
        found |= {f"selection, {direction}": selection, f"retraining, {direction}": total - selection}
    return pd.DataFrame(found)[COLUMNS]


def cost_cells(rows: pd.DataFrame, order: list[Any]) -> pd.DataFrame:
    """Means over seeds as text, ``[stages and methods, columns]``; without those of retraining where nothing was retrained.

    Args:
        rows: of a comparison, with the columns of :data:`COLUMNS`.
        order: pairs of heads and kinds, in the order of the table.

    Raises:
        GateError: if it is known of no row what selecting its heads took.
    """
    means = rows.groupby(["stage", "method", "heads", "kinds"])[COLUMNS].mean()
    if means.isna().all(axis=None):
        raise GateError(
            "--costs is given, but these directories do not say what selecting heads took: their comparison.csv has neither "
            "selection_forward_examples nor counted rows of the stage post hoc; leave it out"
        )
    if not (means[COLUMNS[2:]] > 0).any(axis=None):
        means = means[COLUMNS[:2]]

    def text(costs: pd.Series) -> str:
        texts = [f"{cost / 1000:,.1f}" for cost in costs.droplevel(["stage", "method"]).reindex(order).dropna()]
        return " / ".join(texts if len(set(texts)) > 1 else texts[:1])

    return means.groupby(level=["stage", "method"], sort=False).agg(text)


def _column(rows: pd.DataFrame, name: str) -> pd.Series:
    return rows[name].astype(float) if name in rows else pd.Series(float("nan"), rows.index)
