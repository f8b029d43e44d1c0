"""In which order heads close while gates are learned, by role: whether specialised heads close later than the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from gates.errors import GateError
from training.analysis.model import Finding
from training.analysis.role_story_plots import open_by_role
from training.report.contents import group_labels
from training.report.reading import BESIDE_GATES, COLUMNS
from training.report.role_table import NONE, SPECIALISED, members_by_role, read_roles, roles_of_gates
from training.runs.stored import read_table
from training.stats.bootstrap import Array
from training.stats.heads import Estimate, estimate, shares, superiority
from training.stats.numbers import counted, listed

CLOSED = 0.5
"""A head closes when its gate falls below it for good."""
OTHERS = "others"
POINTS = 41
"""Of a line in the picture."""
PANELS = 3


@dataclass(frozen=True)
class Closing:
    """When the gates of one method close on their way to one budget.

    Args:
        method, budget: of the gates.
        sites: label and number of gates of each site.
        times: shares of pruning from 0 to 1, infinite for gates that stay open, ``[seeds, gates]``.
    """

    method: str
    budget: int
    sites: tuple[tuple[str, int], ...]
    times: Array


def closing_of_roles(run: str, roles: str) -> Finding:
    """When the heads of every role close, and how often a specialised head closes after another one.

    Args:
        run: directory of a run or comparison that learned gates.
        roles: ``roles.csv`` of the same model.

    Raises:
        GateError: if one of them is missing, or they are not of the same heads.
    """
    table, by_role, by_head, panels = read_roles(Path(roles)), [], [], dict[str, dict[str, Array]]()
    for closing in read_closings(Path(run)):
        own = roles_of_gates(table, closing.sites, f"the gates over time in {run!r}")
        by_role.append(role_rows(closing, own))
        by_head.append(head_rows(closing, own))
        if len(panels) < PANELS:
            panels[f"{closing.method}, {counted(closing.budget, 'head')}"] = open_shares(closing, own)
    found = pd.concat(by_role, ignore_index=True)
    figures: dict[str, Figure] = {"closing": open_by_role(panels, "pruning (%)")}
    numbers = {"courses": len(by_role), SPECIALISED: int(own[SPECIALISED].sum())}
    return Finding(
        {"closing": found, "closing_heads": pd.concat(by_head, ignore_index=True)}, figures, closing_told(found), numbers
    )


def read_closings(run: Path) -> Iterator[Closing]:
    """From the gates over time of a run or comparison; methods that share the gates of an earlier one are left out.

    Raises:
        GateError: if there are none, or too few steps of them.
    """
    try:
        table = read_table(run / "gates_over_time.csv", needed=COLUMNS["gates_over_time.csv"])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise GateError(
            f"{str(run)!r} has no gates_over_time.csv; give the directory of a finished run or comparison that learned gates"
        ) from error
    names = [name for name in table if name not in COLUMNS["gates_over_time.csv"] and not BESIDE_GATES.fullmatch(str(name))]
    sites = tuple((site.label, site.gates) for site in group_labels([str(name).rpartition(".")[0] for name in names]))
    if not len(table) or not names:
        raise GateError(f"gates_over_time.csv in {str(run)!r} holds no gates; give a run or comparison that learned gates")
    known: dict[int, list[Array]] = {}
    for (method, budget), rows in table.groupby(["method", "budget"], sort=False):
        times = []
        for seed, own in rows.groupby("seed", sort=True):
            ordered = own.sort_values("step")
            values = ordered[names].to_numpy(dtype=float)
            if len(values) < 2 or not np.isfinite(values).all():
                raise GateError(
                    f"gates_over_time.csv in {str(run)!r} has too few steps or gates of {method}, seed {seed}; give a run that "
                    "logged two steps or more"
                )
            times.append(closing_times(ordered["step"].to_numpy(dtype=float), values))
        stacked = np.stack(times)
        if not any(np.array_equal(stacked, other) for other in known.get(int(str(budget)), [])):
            known.setdefault(int(str(budget)), []).append(stacked)
            yield Closing(str(method), int(str(budget)), sites, stacked)


def closing_times(steps: Array, values: Array) -> Array:
    """When each gate falls below one half for good, as a share of the way from the first step to the last, between two steps in
    a straight line; infinite for gates that do not, ``[gates]``.

    Args:
        steps: ``[steps]``, rising.
        values: of the gates, ``[steps, gates]``.

    >>> closing_times(np.array([0.0, 10.0, 20.0]), np.array([[1.0, 1.0, 0.2], [1.0, 0.0, 0.8], [1.0, 0.0, 0.3]])).tolist()
    [inf, 0.25, 0.8]
    """
    place = (steps - steps[0]) / (steps[-1] - steps[0])
    above = values >= CLOSED
    last = len(steps) - 1 - above[::-1].argmax(axis=0)  # the last step at which it is open
    after = np.minimum(last + 1, len(steps) - 1)
    gates = np.arange(values.shape[1])
    before, behind = values[last, gates], values[after, gates]
    part = np.divide(before - CLOSED, before - behind, out=np.zeros_like(before), where=before > behind)
    times = np.where(above[-1], np.inf, place[last] + part * (place[after] - place[last]))
    return np.where(above.any(axis=0), times, 0.0)


def role_rows(closing: Closing, roles: pd.DataFrame) -> pd.DataFrame:
    """Of the specialised heads and of those of every role: the median time, how many close, and how often one closes later than
    a head outside the group, with its interval over heads."""
    rows = []
    for name, members in {SPECIALISED: roles[SPECIALISED].to_numpy(dtype=bool), **members_by_role(roles)}.items():
        smaller = min(int(members.sum()), int((~members).sum()))
        later, own = estimate(superiority(closing.times, members), smaller), closing.times[:, members]
        middle = float(np.median(own)) if own.size else np.nan
        rows.append(
            {
                "method": closing.method,
                "budget": closing.budget,
                "seeds": len(closing.times),
                "role": name,
                "heads": int(members.sum()),
                "closed": float(np.isfinite(own).mean()) if own.size else np.nan,
                "median_time": middle if np.isfinite(middle) else np.nan,
                "later": later.value,
                "low": later.low,
                "high": later.high,
            }
        )
    return pd.DataFrame(rows)


def head_rows(closing: Closing, roles: pd.DataFrame) -> pd.DataFrame:
    """The median time of every gate over seeds (NaN where it stays open in most), and in how many seeds it closes."""
    middle = np.median(closing.times, axis=0)
    return roles[["site", "head", "roles", SPECIALISED]].assign(
        method=closing.method,
        budget=closing.budget,
        seeds=len(closing.times),
        closes_in=np.isfinite(closing.times).sum(axis=0),
        median_time=np.where(np.isfinite(middle), middle, np.nan),
    )


def open_shares(closing: Closing, roles: pd.DataFrame) -> dict[str, Array]:
    """The share of open heads over pruning, ``[3, points]`` with its interval, of specialised and other heads and of roles."""
    places = np.linspace(0, 1, POINTS)
    is_open = (closing.times[:, :, None] > places).mean(axis=0)
    special = roles[SPECIALISED].to_numpy(dtype=bool)
    groups = {SPECIALISED: special, OTHERS: ~special} | members_by_role(roles)
    return {name: shares(is_open, members) for name, members in groups.items() if members.any() and name != NONE}


def closing_told(table: pd.DataFrame) -> list[str]:
    """What :func:`role_rows` say, in words."""
    sentences = [
        "A head closes when its gate falls below one half for good. How often a head of a group closes after one outside it is "
        "50 % by chance; intervals are over heads."
    ]
    for (method, budget), rows in table.groupby(["method", "budget"], sort=False):
        named = {row["role"]: row for row in rows.to_dict("records")}
        first = named.pop(SPECIALISED)
        found = Estimate(first["later"], first["low"], first["high"])
        if not np.isfinite(found.value):
            sentences.append(
                f"{method} at {budget} heads: all heads are specialised or none is, so there is nothing to compare."
            )
            continue
        word = (
            "later" if found.low > 0.5 else "earlier" if found.high < 0.5 else "neither later nor earlier, as far as is shown"
        )
        parts = [f"{name} {_percent(Estimate(row['later'], row['low'], row['high']))}" for name, row in named.items()]
        sentences.append(
            f"{method} at {budget} heads, {counted(int(first['seeds']), 'seed')}: a specialised head closes after another one "
            f"in {_percent(found)} of all pairs: {word}. By role: {listed(parts)}."
        )
    return sentences


def _percent(found: Estimate) -> str:
    sure = f" ({100 * found.low:.0f} to {100 * found.high:.0f} %)" if np.isfinite(found.low) else ""
    return f"{100 * found.value:.0f} %{sure}"
