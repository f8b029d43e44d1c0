"""Known truth as a table of ticks: which method found the heads that are necessary by construction."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gates.errors import GateError
from training.plotting import styled
from training.report.figures import KEPT
from training.stats.numbers import counted, listed
from training.truth.survival import smallest_budgets, with_program

COLUMNS = ("program", "method", "seed", "recovered", "precision", "recall", "smallest")
"""Of a table of recoveries; ``smallest`` is the smallest budget at which the function survives, and may be missing."""
TICK, CROSS = "\N{CHECK MARK}", "\N{BALLOT X}"
MEANS = ("exact", "precision", "recall")
"""Columns of means at the right of the ticks."""


def recoveries(truth: pd.DataFrame) -> pd.DataFrame:
    """One row per program, method and seed, of what ``truth.csv`` tells of masks of several budgets.

    Args:
        truth: a row per seed, method and budget with ``needed`` (necessary functions), ``exact``, ``precision``, ``recall`` and
            ``survives``, and ``program`` where there are several; or a table of recoveries already.

    Returns:
        :data:`COLUMNS`: recovered, precision and recall where the budget is the number of necessary functions; the smallest
        budget from which on the function survives at every larger one, NaN where there is none.

    Raises:
        GateError: for a table without these columns.
    """
    if set(COLUMNS) <= set(truth):
        return truth[list(COLUMNS)]
    lacking = {"seed", "method", "budget", "needed", "exact", "precision", "recall", "survives"} - set(truth)
    if lacking:
        raise GateError(f"a table of known truth has no column {listed(sorted(map(repr, lacking)))}; write the results again")
    truth, key = with_program(truth), ["program", "method", "seed"]
    smallest = smallest_budgets(truth)[[*key, "smallest"]]
    at_needed = truth[truth["budget"] == truth["needed"]].rename(columns={"exact": "recovered"})
    return at_needed[[*key, "recovered", "precision", "recall"]].merge(smallest, on=key, how="left")


@styled
def ticks(table: pd.DataFrame) -> Figure:
    """Methods (rows, the best first) by programs (columns): a tick where every seed found exactly the necessary heads, a cross
    where none did, otherwise how many did; small below it the smallest budget at which the function survives, the mean over
    seeds; at the right the means over programs.

    Args:
        table: with :data:`COLUMNS`, of which ``smallest`` may lack; ``recovered`` is a truth value, the others are numbers.
    """
    shares = _shares(table)
    methods, programs = list(shares.index), list(shares.columns)
    by_method = table.assign(exact=table["recovered"].astype(float)).groupby("method")[list(MEANS)].mean().loc[methods]
    cells = table.assign(recovered=table["recovered"].astype(float)).groupby(["method", "program"])
    found, seeds = cells["recovered"].sum(), cells["recovered"].size()
    smallest = cells["smallest"].mean() if "smallest" in table else pd.Series(dtype=float)
    name = 0.075 * max(map(len, map(str, methods)))
    figure = Figure(
        figsize=(0.5 + name + 0.62 * len(programs) + 0.75 * len(MEANS), 1.5 + 0.34 * len(methods)), layout="constrained"
    )
    axes = figure.subplots()
    grid = np.hstack([shares.to_numpy(), np.full((len(methods), 1 + len(MEANS)), np.nan)])
    axes.imshow(grid, cmap=KEPT, vmin=0, vmax=1.6, aspect="auto", interpolation="none")  # so that ticks are seen on the darkest
    for row, method in enumerate(methods):
        for column, program in enumerate(programs):
            if (method, program) not in found.index:
                continue
            count, of = int(found[method, program]), int(seeds[method, program])
            dark = "white" if count / of > 0.75 else "#1c1f24"
            budget = smallest.get((method, program), np.nan)
            low = 0.12 if np.isfinite(budget) else 0.0
            axes.text(column, row - low, _mark(count, of), ha="center", va="center", color=dark, fontsize=9)
            if low:
                axes.text(column, row + 0.3, f"{budget:.3g}", ha="center", va="center", color=dark, fontsize=6)
        for place, name_of_mean in enumerate(MEANS):
            at = len(programs) + 1 + place
            axes.text(at, row, f"{by_method[name_of_mean][method]:.2f}", ha="center", va="center", fontsize=8)
    axes.hlines(np.arange(len(methods) - 1) + 0.5, -0.5, len(programs) - 0.5, colors="white", linewidth=1.2)
    axes.vlines(np.arange(len(programs) - 1) + 0.5, -0.5, len(methods) - 0.5, colors="white", linewidth=1.2)
    axes.set_yticks(range(len(methods)), methods)
    places = [*range(len(programs)), *(len(programs) + 1 + place for place in range(len(MEANS)))]
    axes.set_xticks(places, [*map(str, programs), *MEANS], rotation=35, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    below = "; small: fewest heads with which it survives" if smallest.notna().any() else ""
    axes.set_title(f"exactly the necessary heads found ({counted(int(seeds.max()), 'seed')}{below})", fontsize=8.5)
    return figure


def caption(table: pd.DataFrame) -> str:
    """Which method recovers most, and which recover nothing."""
    shares = _shares(table)
    every = (shares == 1).sum(axis=1)
    best = list(every.index[every == every.max()])
    none = [str(method) for method in shares.index[(shares.fillna(0) == 0).all(axis=1)]]
    of = f"of {counted(shares.shape[1], 'program')}"
    text = f"Exactly the necessary heads in every seed: {listed(list(map(str, best)))} in {every.max()} {of}."
    return text + (f" In none: {listed(none)}." if none else "")


def _shares(table: pd.DataFrame) -> pd.DataFrame:
    """Share of seeds with exact recovery, ``[methods, programs]``, methods by their mean, programs as they come."""
    shares = table.assign(recovered=table["recovered"].astype(float)).pivot_table(
        index="method", columns="program", values="recovered", aggfunc="mean", sort=False
    )
    shares = shares.reindex(columns=list(dict.fromkeys(table["program"])))
    return shares.loc[shares.mean(axis=1).sort_values(ascending=False, kind="stable").index]


def _mark(count: int, of: int) -> str:
    return TICK if count == of else CROSS if count == 0 else f"{count}/{of}"
