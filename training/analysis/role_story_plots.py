"""The pictures of what roles have to do with scores and with pruning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from training.plotting import COLOURS, INK, styled
from training.report.role_plots import BLANK, COLOUR_OF
from training.stats.bootstrap import Array
from training.stats.significance import Interval

LINES: dict[str, dict[str, Any]] = {
    "specialised": {"color": INK, "linewidth": 2.2},
    "others": {"color": COLOURS[-1], "linewidth": 2.2},
    **{name: {"color": colour, "linewidth": 1.0, "linestyle": "--"} for name, colour in COLOUR_OF.items()},
}
"""Of groups of heads."""


@styled
def ranks_of_roles(heads: pd.DataFrame) -> Figure:
    """Every head by its ranks of HIS and of entropy, in the colour of its first role; lines at the medians.

    Args:
        heads: a row for each, with ``roles``, ``his_rank`` and ``entropy_rank`` (1 is the largest).
    """
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axes = figure.subplots()
    first = heads["roles"].str.partition(",")[0]
    for name in [*COLOUR_OF, "none"]:
        own, colour = heads[first == name], COLOUR_OF.get(name, BLANK)
        axes.scatter(own["his_rank"], own["entropy_rank"], s=34, color=colour, edgecolor=INK, linewidth=0.5)
    for draw, column in ((axes.axvline, "his_rank"), (axes.axhline, "entropy_rank")):
        draw(heads[column].median(), color=INK, linewidth=0.6, linestyle=":")
    axes.set(xlabel="rank by HIS (left: important)", ylabel="rank by entropy (top: broad)", title="by first role")
    axes.invert_yaxis()
    present = [name for name in [*COLOUR_OF, "none"] if (first == name).any()]
    handles = [
        Line2D([], [], linestyle="", marker="o", color=COLOUR_OF.get(name, BLANK), markeredgecolor=INK, label=name)
        for name in present
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


@styled
def open_by_role(panels: Mapping[str, Mapping[str, Array]], axis: str) -> Figure:
    """The share of heads that are still open over pruning, a panel each; bands are 95 % intervals over heads.

    Args:
        panels: by title, by name of a group of heads: ``[3, points]``, the share with both ends of its interval, at equal
            distances from the beginning to the end of pruning.
        axis: what the horizontal axis is.
    """
    figure = Figure(figsize=(1.4 + 3.2 * len(panels), 3.6), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, groups) in zip(grid, panels.items(), strict=True):
        for name, (share, low, high) in groups.items():
            places, style = 100 * np.linspace(0, 1, len(share)), LINES[name]
            axes.plot(places, 100 * share, **style)
            if name not in COLOUR_OF:
                axes.fill_between(places, 100 * low, 100 * high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel=axis, ylim=(0, 102))
        axes.grid()
    grid[0].set_ylabel("heads open (%)")
    names = [name for name in LINES if any(name in groups for groups in panels.values())]
    figure.legend(handles=[Line2D([], [], label=name, **LINES[name]) for name in names], loc="outside lower center", ncols=6)
    return figure


@styled
def kept_roles(table: pd.DataFrame) -> Figure:
    """Heads that keep, lose and gain each role, a bar each.

    Args:
        table: a row for each role, with ``kept``, ``lost`` and ``gained``.
    """
    rows = table[(table["before"] > 0) | (table["after"] > 0)]
    figure = Figure(figsize=(5.6, 1.4 + 0.36 * max(1, len(rows))), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(rows))
    for name, colour in (("kept", COLOURS[0]), ("lost", COLOURS[1]), ("gained", COLOURS[2])):
        axes.barh(rows["role"], rows[name], left=left, color=colour, edgecolor=INK, linewidth=0.3, label=name)
        left = left + rows[name].to_numpy()
    axes.invert_yaxis()
    axes.set(xlabel="heads", title="roles before and after")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@styled
def roles_over_time(table: pd.DataFrame, unit: str) -> Figure:
    """How many heads have each role at every look, and of a run how many gates are open for the specialised ones; dotted lines
    end the phases.

    Args:
        table: a row for each look and role, with ``time``, ``phase``, ``with_role`` and ``open``.
        unit: of the times.
    """
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    shown = []
    for name, rows in table.groupby("role", sort=False):
        if rows["with_role"].any():
            axes.plot(rows["time"], rows["with_role"], marker=".", **LINES[str(name)])
            shown.append(Line2D([], [], label=str(name), **LINES[str(name)]))
    special = table[table["role"] == "specialised"]
    if special["open"].notna().all():
        style: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": ":"}
        axes.plot(special["time"], special["open"], marker=".", **style)
        shown.append(Line2D([], [], label="specialised and open", **style))
    ends = special["time"][special["phase"].ne(special["phase"].shift(-1))].tolist()
    for end in ends[1:-1]:  # not in front of the run, nor behind it
        axes.axvline(end, color=COLOURS[-1], linestyle=":", linewidth=1.0)
    axes.set(xlabel=unit, ylabel="heads with the role", title="roles through training")
    axes.set_ylim(bottom=0)
    axes.grid()
    figure.legend(handles=shown, loc="outside lower center", ncols=4)
    return figure


@styled
def role_depths(depths: Mapping[str, Array], means: Mapping[str, Interval]) -> Figure:
    """Every head with a role by its depth, and the mean depth of each role with its 95 % interval.

    Args:
        depths: of the heads with each role, from 0 (first layer) to 1 (last).
        means: of each role, with intervals.
    """
    figure = Figure(figsize=(5.6, 1.4 + 0.4 * len(depths)), layout="constrained")
    axes = figure.subplots()
    for row, (name, values) in enumerate(depths.items()):
        found = means[name]
        spread = np.zeros(len(values))
        for depth in np.unique(values):  # the heads of a layer lie above each other
            own = values == depth
            spread[own] = 0.06 * (np.arange(own.sum()) - (own.sum() - 1) / 2)
        colour = COLOUR_OF.get(name, COLOURS[-1])
        axes.scatter(values, row + spread, s=10, color=colour, edgecolors=INK, linewidths=0.2)
        if np.isfinite(found.low):
            axes.plot([found.low, found.high], [row, row], color=INK, linewidth=1.2)
        axes.plot(found.mean, row, marker="|", markersize=14, color=INK)
    axes.set_yticks(range(len(depths)), [f"{name} ({len(values)})" for name, values in depths.items()])
    axes.invert_yaxis()
    axes.set(xlabel="depth, from the first layer to the last", xlim=(-0.05, 1.05), title="where roles lie; 95 % intervals")
    axes.grid(axis="x")
    return figure
