"""How far gates had decided themselves when their mask was fixed, in words."""

from __future__ import annotations

import pandas as pd

from training.stats.numbers import CLOSED, counted, listed

ENOUGH = 0.9
"""Share of the closed heads that gates are to close themselves."""
HINT = "a longer prune phase (a larger --model.prune) leaves less to the rank"


def said_of_closed(summary: pd.DataFrame, unit: str = "head") -> str:
    """How many of the closed heads had closed by themselves, by method and budget; empty where no gates learned.

    Args:
        summary: as :func:`training.stats.statistics.summarise` returns it; tables of earlier versions say nothing of this.
        unit: what budgets count, ``head`` or ``group``.
    """
    if CLOSED not in summary or summary[CLOSED].isna().all():
        return ""
    known = summary.dropna(subset=[CLOSED]).drop_duplicates(["method", "budget"])
    methods: dict[str, list[str]] = {}
    for method, own in known.groupby("method", sort=False):
        shares = zip(own[CLOSED], own["budget"], strict=True)
        said = listed([f"{100 * share:.0f} % at {counted(int(budget), unit)}" for share, budget in shares])
        methods.setdefault(said, []).append(str(method))
    each = "; ".join(f"{listed(names)} {said}" for said, names in methods.items())
    hint = f" Where it is under {100 * ENOUGH:.0f} %, {HINT}." if known[CLOSED].min() < ENOUGH else ""
    return (
        f"Of the {unit}s that are closed, this share had closed by themselves at the end of the prune phase, and the rest was "
        f"closed by their rank, in the mean of the seeds whose mask gates chose: {each}.{hint}"
    )
