"""Which heads keep their roles from one model to another: the pretrained and the fine-tuned one, or that and the pruned one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from gates.errors import GateError
from gates.roles.roles import RULES
from training.analysis.model import Finding
from training.analysis.role_story_plots import kept_roles
from training.report.role_table import SPECIALISED, read_roles
from training.stats.numbers import counted, listed
from training.stats.odds import Table, exact_odds


def changes_of_roles(before: str, after: str) -> Finding:
    """How many heads keep each role. Heads that are in the first table alone are pruned, and do not count.

    Args:
        before, after: tables of the experiment roles about two models of one shape.

    Raises:
        GateError: if they are not of the same heads.
    """
    one, other = read_roles(Path(before)), read_roles(Path(after))
    columns = [SPECIALISED, *(f"{rule.name}_has" for rule in RULES)]
    keys = ["site", "head"]
    joined = one[[*keys, "roles", *columns]].merge(other[[*keys, "roles", *columns]], on=keys, suffixes=("_before", "_after"))
    if len(joined) < len(other) or not set(other["site"]) <= set(one["site"]):
        raise GateError(f"{after!r} has heads that {before!r} has not; give roles of the same model before and after")
    table = pd.DataFrame([_row(joined, name) for name in columns])
    heads = joined[[*keys, "roles_before", "roles_after"]].assign(same=joined["roles_before"] == joined["roles_after"])
    numbers = {"heads": len(joined), "same": int(heads["same"].sum()), "pruned": len(one) - len(joined)}
    tables = {"role_changes": table, "role_changes_heads": heads}
    return Finding(tables, {"role_changes": kept_roles(table)}, _told(table, heads, len(one)), numbers)


def _row(joined: pd.DataFrame, column: str) -> dict[str, Any]:
    """Heads with a role before and after; the share that keeps it, with its exact interval, beside the share of all heads that
    have it after, which chance would keep; and the exact odds ratio."""
    had, has = joined[f"{column}_before"].to_numpy(dtype=bool), joined[f"{column}_after"].to_numpy(dtype=bool)
    both = int((had & has).sum())
    low, high = stats.binomtest(both, int(had.sum())).proportion_ci(method="exact") if had.any() else (np.nan, np.nan)
    odds = exact_odds(Table(both, int((had & ~has).sum()), int((~had & has).sum()), int((~had & ~has).sum())))
    return {
        "role": column.removesuffix("_has"),
        "heads": len(joined),
        "before": int(had.sum()),
        "after": int(has.sum()),
        "kept": both,
        "lost": int((had & ~has).sum()),
        "gained": int((~had & has).sum()),
        "share": both / had.sum() if had.any() else np.nan,
        "low": low,
        "high": high,
        "by_chance": has.mean() if len(has) else np.nan,
        "odds_ratio": odds.ratio,
        "odds_low": odds.low,
        "odds_high": odds.high,
    }


def _told(table: pd.DataFrame, heads: pd.DataFrame, total: int) -> list[str]:
    same, count = int(heads["same"].sum()), len(heads)
    low, high = stats.binomtest(same, count).proportion_ci(method="exact")
    gone = f" (without {counted(total - count, 'head')} of {total} that the second model has not)" if count < total else ""
    sentences = [
        f"{same} of {count} heads ({same / count:.0%}, 95 % interval {low:.0%} to {high:.0%}) have the same roles{gone}."
    ]
    rows = {str(row["role"]): row for row in table.to_dict("records")}
    special = rows.pop(SPECIALISED)
    if special["before"]:
        sentences.append(f"Of the specialised heads {_kept(special)}; {special['gained']} others became specialised.")
    parts = [f"{name} {_kept(row)} and {row['gained']} are new" for name, row in rows.items() if row["before"] or row["after"]]
    if parts:
        sentences.append(f"By role: {listed(parts)}.")
    return sentences


def _kept(row: Mapping[Any, Any]) -> str:
    if not row["before"]:
        return "had no head"
    sure = f"{row['low']:.0%} to {row['high']:.0%}"
    return f"{row['kept']} of {row['before']} stay so ({row['share']:.0%}, {sure}; by chance {row['by_chance']:.0%})"
