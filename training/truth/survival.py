"""From which budget on a function survives in the masks of a method, by the rows of ``truth.csv``."""

from __future__ import annotations

import pandas as pd


def smallest_budgets(truth: pd.DataFrame) -> pd.DataFrame:
    """For each program, method and seed the smallest budget from which on the function survives at every larger one that was
    tried; nan where there is none.

    Returns:
        ``program``, ``method``, ``seed``, ``needed``, ``smallest``.
    """
    rows = []
    for (program, method, seed), tried in with_program(truth).groupby(["program", "method", "seed"], sort=False):
        falling = tried.sort_values("budget", ascending=False)
        alive = falling[falling["survives"].cumprod().astype(bool)]
        smallest = float(alive["budget"].min()) if len(alive) else float("nan")
        rows.append((program, method, seed, int(tried["needed"].iloc[0]), smallest))
    return pd.DataFrame(rows, columns=["program", "method", "seed", "needed", "smallest"])


def with_program(truth: pd.DataFrame) -> pd.DataFrame:
    """A comparison of one program does not name it."""
    return truth if "program" in truth else truth.assign(program="")
