"""Pictures of quality: the main metric against the heads that are kept, and by method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.config.stages import is_post_hoc
from training.plotting import COLOURS, INK, MARKERS, label_ends, legend_beside, method_styles, spread_widely_, styled
from training.report.contents import Contents, is_dense
from training.stats.numbers import IN_PERCENT, counted, shown, unit

STAGE_TITLES = {
    "post hoc": "mask only (post hoc)",
    "post hoc with means": "mask only, closed heads at their mean",
    "post hoc with optimal constants": "mask only, closed heads at fitted constants",
    "post hoc with uniform attention": "mask only, closed heads attend uniformly",
    "retrained": "retrained with the mask",
    "retrained from dense": "retrained with the mask, all equally long",
    "retrained at equal total cost": "retrained, finding the mask paid for",
    "from scratch": "trained from scratch with the mask",
}
WIDTH = 4.4
"""Inches of a picture without its legend: at this width its text is as large as a phone's screen allows."""
LETTER = 0.07
"""Inches of a letter of a legend, about."""
FEW = 4
"""Methods whose lines bear their names; more are named in a legend."""
BARS = "\nbars: 95 % interval of the mean over seeds"
"""Below the axis, where no legend is."""
DENSE, MAJORITY = "dense", "majority class"


@styled
def quality_against_heads(contents: Contents, stage: str) -> Figure:
    """The main metric on the test split as heads are taken away: a line per method through its means over seeds, a band from
    its lowest to its highest seed, and the dense model. Budgets are equally far apart, since they mostly halve.

    Args:
        contents: with means and, for bands, the results of the single seeds.
        stage: of the results.
    """
    known = set(_of_stage(contents, stage)["method"])
    methods = [method for method in contents.methods if method in known]
    figure, styles = _figure(methods, 3.4), method_styles(contents.methods)
    axes = figure.subplots()
    ends = draw_quality(axes, contents, stage, styles)
    axes.set_title(f"{STAGE_TITLES.get(stage, stage)}\n{what_is_drawn(contents, stage)}", fontsize=8.5)
    if len(methods) > FEW:
        legend_beside(figure, axes, sorted(ends, key=lambda name: -ends[name]))
    else:
        label_ends(axes, {name: (end, str(styles[name]["color"]) if name in styles else INK) for name, end in ends.items()})
    return figure


def draw_quality(axes: Axes, contents: Contents, stage: str, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What :func:`quality_against_heads` shows, on axes that are there, without a title and names.

    Args:
        axes: to draw on.
        contents, stage: as there.
        styles: of the lines by method, which several axes can share.

    Returns:
        Where each line ends, by its name, as shown.
    """
    metric, rows = contents.metric, _of_stage(contents, stage)
    dense = contents.summary[(contents.summary["stage"] == stage) & (contents.summary["method"] == DENSE)]
    budgets, seeds = sorted(map(int, set(rows["budget"]))), _seeds(contents, stage)
    ends: dict[str, float] = {}
    for method in (method for method in contents.methods if method in set(rows["method"])):
        line, style = rows[rows["method"] == method].sort_values("budget"), styles[method]
        means, x = shown(metric, line["mean"]), line["budget"].map(budgets.index)
        axes.plot(x, means, **style, markersize=4.5, linewidth=1.4, label=method)
        of_method = seeds[seeds["method"] == method].set_index("budget").reindex(line["budget"])
        if (of_method["count"] > 1).any():
            low, high = (shown(metric, of_method[end]).to_numpy() for end in ("min", "max"))
            axes.fill_between(x, low, high, color=str(style["color"]), alpha=0.14, linewidth=0)
        ends[method] = float(means.iloc[0])
    if len(dense):
        ends[DENSE] = shown(metric, float(dense["mean"].iloc[0]))
        axes.axhline(ends[DENSE], color=INK, linestyle=":", linewidth=1.2, label=DENSE)
    _limit(axes, rows, dense, metric)
    if contents.lower_is_better:
        spread_widely_(axes, [*rows["mean"], *dense["mean"].dropna()])
    if _majority(axes, contents):
        assert contents.majority is not None
        ends[MAJORITY] = shown(metric, contents.majority)
    ticks, title = contents.axis(budgets)
    axes.set_xticks(range(len(budgets)), ticks)
    axes.set(xlabel=title, ylabel=f"test {metric}{unit(metric)}")
    axes.set_xlim(len(budgets) - 0.85, -0.15)  # heads are taken away from left to right
    axes.grid(visible=True, axis="y")
    return ends


def what_is_drawn(contents: Contents, stage: str) -> str:
    """What lines and bands of :func:`draw_quality` are."""
    seeds = _seeds(contents, stage)
    most = int(seeds["count"].max()) if len(seeds) else 0
    return f"lines: means, bands: lowest to highest of {counted(most, 'seed')}" if most > 1 else "of one seed" * (most == 1)


def _of_stage(contents: Contents, stage: str) -> pd.DataFrame:
    """The means of a stage, but for the dense model's."""
    rows = contents.summary[contents.summary["stage"] == stage]
    return rows[~is_dense(rows)].dropna(subset=["mean"])


@styled
def quality_of_methods(contents: Contents) -> Figure:
    """The main metric on the test split at the one budget: open markers post hoc, filled ones retrained, 95 % intervals."""
    metric = contents.metric
    rows = contents.summary[~is_dense(contents.summary)]
    last = rows[rows["stage"] == rows["stage"].iloc[-1]].set_index("method")["mean"]
    sign = -1 if contents.lower_is_better else 1
    methods = sorted(contents.methods, key=lambda method: sign * last.get(method, -sign * np.inf))
    figure = Figure(figsize=(WIDTH + LETTER * 22, 1.2 + 0.26 * len(methods)), layout="constrained")
    axes = figure.subplots()
    bars = False
    for index, stage in enumerate(contents.stages):
        of_stage = rows[rows["stage"] == stage]
        y = np.array([methods.index(method) for method in of_stage["method"]]) + 0.12 * (index - (len(contents.stages) - 1) / 2)
        colour = COLOURS[index]
        fill: dict[str, Any] = {"facecolors": "none" if is_post_hoc(stage) else colour, "edgecolors": colour}
        axes.scatter(shown(metric, of_stage["mean"]), y, marker=MARKERS[index], s=32, label=stage, zorder=3, **fill)
        if {"low", "high"} <= set(of_stage) and of_stage["low"].notna().any():
            bars = True
            low, high = shown(metric, of_stage["low"]), shown(metric, of_stage["high"])
            axes.hlines(y, low, high, colors=colour, linewidth=1.1, alpha=0.75)
        dense = contents.summary[(contents.summary["method"] == "dense") & (contents.summary["stage"] == stage)]
        if len(dense):
            value, dashes = shown(metric, float(dense["mean"].iloc[0])), ":" if is_post_hoc(stage) else "--"
            axes.axvline(value, color=INK, linestyle=dashes, linewidth=1, label=f"dense, {stage}")
    if contents.lower_is_better:
        spread_widely_(axes, rows["mean"].dropna(), axis="x")
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlabel=f"test {metric}{unit(metric)}{BARS if bars else ''}")
    axes.grid(visible=True)
    legend_beside(figure, axes)
    return figure


@styled
def curve_of_run(contents: Contents) -> Figure:
    """A run's rankings at other budgets: the main metric on the selection split, mask only."""
    assert contents.curve is not None
    metric, column = contents.metric, f"select_{contents.metric}"
    names = list(dict.fromkeys(map(str, contents.curve["method"])))
    styles = method_styles(list(dict.fromkeys([*contents.methods, *names])))
    figure = _figure(names, 3.3)
    axes = figure.subplots()
    ends = {}
    for method in names:
        line = contents.curve[contents.curve["method"] == method].sort_values("heads")
        values = shown(metric, line[column])
        axes.plot(line["heads"], values, **styles[method], markersize=4.5, linewidth=1.3, label=method)
        ends[method] = float(values.iloc[0])
    if contents.lower_is_better:
        spread_widely_(axes, contents.curve[column])
    axes.set_xticks(sorted(set(contents.curve["heads"])))
    axes.set(xlabel="heads kept", ylabel=f"{metric}{unit(metric)} (selection split)", title=STAGE_TITLES["post hoc"])
    axes.invert_xaxis()
    axes.grid(visible=True, axis="y")
    if len(names) > FEW:
        legend_beside(figure, axes, sorted(ends, key=lambda name: -ends[name]))
    else:
        label_ends(axes, {name: (end, str(styles[name]["color"])) for name, end in ends.items()})
    return figure


def _figure(methods: list[str], height: float) -> Figure:
    """With room for the plot and, beside it, for names and samples of their lines."""
    letters = max(map(len, [DENSE, *methods]))
    beside = LETTER * letters + (0.55 if len(methods) > FEW else 0.1)
    return Figure(figsize=(WIDTH + beside, max(height, 0.6 + 0.19 * (len(methods) + 2))), layout="constrained")


def _seeds(contents: Contents, stage: str) -> pd.DataFrame:
    """The lowest and the highest seed of each method and budget: columns method, budget, min, max, count."""
    rows, main = contents.comparison, f"test_{contents.metric}"
    if not {"stage", "method", "budget", main} <= set(rows):
        return pd.DataFrame(columns=["method", "budget", "min", "max", "count"])
    of_stage = rows[(rows["stage"] == stage) & ~is_dense(rows)]
    return of_stage.groupby(["method", "budget"], as_index=False)[main].agg(["min", "max", "count"])


def _majority(axes: Axes, contents: Contents) -> bool:
    """What always answering the most frequent class would score, where that is within the frame."""
    if contents.majority is None:
        return False
    value, (bottom, top) = shown(contents.metric, contents.majority), axes.get_ylim()
    if bottom <= value <= top:
        axes.axhline(value, color=INK, linestyle=(0, (1, 3)), linewidth=1, label=MAJORITY)
    return bool(bottom <= value <= top)


def _limit(axes: Axes, rows: pd.DataFrame, dense: pd.DataFrame, metric: str) -> None:
    """Frame the means; a band of seeds that is many times wider is cut by the frame."""
    means = shown(metric, pd.concat([rows["mean"], dense["mean"]]).dropna())
    if not len(means):
        return
    least = float(means.min())
    room = 0.6 * max(float(means.max()) - least, 1e-3 * abs(float(means.max())), 1e-9)
    bottom, top = axes.get_ylim()
    most = 101.0 if metric in IN_PERCENT else np.inf  # a share of more than all is no result; a mark at 100 % has room
    axes.set_ylim(max(bottom, least - room), min(top, most, float(means.max()) + room))
