"""The pictures of a report, each drawn from what a directory holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from training.config.stages import is_post_hoc
from training.plotting import COLOURS, INK, MAP, MARKERS, line_style, styled
from training.report.contents import Contents, Course, Site, Values, is_dense
from training.stats.numbers import IN_PERCENT, shown, unit

STAGE_TITLES = {
    "post hoc": "mask only (post hoc)",
    "post hoc with means": "mask only, closed heads at their mean",
    "post hoc with optimal constants": "mask only, closed heads at fitted constants",
    "post hoc with uniform attention": "mask only, closed heads attend uniformly",
    "retrained": "retrained with the mask",
}
WIDTH = 4.6
"""Inches of most pictures: at this width their text is as large as a phone's screen allows."""
COLUMNS = 4
"""Heat maps side by side."""
LEGEND_WIDTH = 60
"""Letters of the names of a legend side by side."""


def styles(contents: Contents) -> dict[str, dict[str, Any]]:
    """One style per method, the same in all pictures of the directory."""
    return {method: line_style(index) for index, method in enumerate(contents.methods)}


def legend_below(figure: Figure, axes: Axes) -> None:
    """The names of an axes' lines in three columns below the picture, in fewer where a name is long."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, LEGEND_WIDTH // max([1, *map(len, labels)])))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


@styled
def quality_against_heads(contents: Contents, stage: str) -> Figure:
    """The main metric on the test split against heads kept: a line per method, with 95 % intervals, beside the dense model.
    Budgets are equally far apart, since they mostly halve."""
    metric, style = contents.metric, styles(contents)
    rows = contents.summary[contents.summary["stage"] == stage]
    dense, rows = rows[rows["method"] == "dense"], rows[~is_dense(rows)]
    methods = [method for method in contents.methods if method in set(rows["method"])]
    figure = Figure(figsize=(WIDTH, 3.3 + 0.17 * (len(methods) // 3)), layout="constrained")
    axes = figure.subplots()
    budgets = sorted(map(int, set(rows["budget"])))
    step = min(0.03, 0.5 / max(1, len(methods)))  # apart, or intervals hide one another
    for index, method in enumerate(methods):
        line = rows[rows["method"] == method].sort_values("budget")
        x = line["budget"].map(budgets.index) + step * (index - (len(methods) - 1) / 2)
        axes.plot(x, shown(metric, line["mean"]), **style[method], markersize=4.5, linewidth=1.3, label=method)
        _intervals(axes, x, line, metric, colour=str(style[method]["color"]))
    if len(dense):
        axes.axhline(shown(metric, float(dense["mean"].iloc[0])), color=INK, linestyle=":", linewidth=1.2, label="dense")
    _limit(axes, rows, dense, metric)
    _majority(axes, contents)
    ticks, title = contents.axis(budgets)
    axes.set_xticks(range(len(budgets)), ticks)
    axes.set(xlabel=title, ylabel=f"test {metric}{unit(metric)}", title=STAGE_TITLES.get(stage, stage))
    axes.grid(visible=True, axis="y")
    legend_below(figure, axes)
    return figure


@styled
def quality_of_methods(contents: Contents) -> Figure:
    """The main metric on the test split at the one budget: open markers post hoc, filled ones retrained, with intervals."""
    metric = contents.metric
    rows = contents.summary[~is_dense(contents.summary)]
    last = rows[rows["stage"] == rows["stage"].iloc[-1]].set_index("method")["mean"]
    methods = sorted(contents.methods, key=lambda method: last.get(method, -np.inf))
    figure = Figure(figsize=(WIDTH, 1.4 + 0.26 * len(methods)), layout="constrained")
    axes = figure.subplots()
    for index, stage in enumerate(contents.stages):
        of_stage = rows[rows["stage"] == stage]
        y = np.array([methods.index(method) for method in of_stage["method"]]) + 0.12 * (index - (len(contents.stages) - 1) / 2)
        colour = COLOURS[index]
        fill: dict[str, Any] = {"facecolors": "none" if is_post_hoc(stage) else colour, "edgecolors": colour}
        axes.scatter(shown(metric, of_stage["mean"]), y, marker=MARKERS[index], s=32, label=stage, zorder=3, **fill)
        _intervals(axes, y, of_stage, metric, colour=COLOURS[index], across=True)
        dense = contents.summary[(contents.summary["method"] == "dense") & (contents.summary["stage"] == stage)]
        if len(dense):
            value, dashes = shown(metric, float(dense["mean"].iloc[0])), ":" if is_post_hoc(stage) else "--"
            axes.axvline(value, color=INK, linestyle=dashes, linewidth=1, label=f"dense, {stage}")
    axes.set_yticks(range(len(methods)), methods)
    axes.set(xlabel=f"test {metric}{unit(metric)}")
    axes.grid(visible=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@styled
def curve_of_run(contents: Contents) -> Figure:
    """A run's rankings at other budgets: the main metric on the selection split, mask only."""
    assert contents.curve is not None
    metric, style = contents.metric, styles(contents)
    names = list(dict.fromkeys(contents.curve["method"]))
    figure = Figure(figsize=(WIDTH, 3.3 + 0.17 * (len(names) // 3)), layout="constrained")
    axes = figure.subplots()
    for index, (method, line) in enumerate(contents.curve.groupby("method", sort=False)):
        look = style.get(str(method), line_style(index))
        axes.plot(line["heads"], shown(metric, line[f"select_{metric}"]), **look, markersize=4.5, linewidth=1.3, label=method)
    axes.set_xticks(sorted(set(contents.curve["heads"])))
    axes.set(xlabel="heads kept", ylabel=f"{metric}{unit(metric)} (selection split)", title=STAGE_TITLES["post hoc"])
    axes.grid(visible=True, axis="y")
    legend_below(figure, axes)
    return figure


@styled
def heat_maps(panels: dict[str, tuple[Values, float | None]]) -> Figure:
    """Layer x head pictures side by side.

    Args:
        panels: title to values and the top of their scale; None takes the largest value, and says so in the title.
    """
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    sites = max(len(values.sites) for values, _ in panels.values())
    figure = Figure(figsize=(1.9 * columns, 0.4 + lines * (0.7 + 0.15 * max(4, sites))), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    shares = None
    for axes, (title, (values, top)) in zip(grid, panels.items(), strict=False):
        image = axes.imshow(values.grid(), cmap=MAP, vmin=0, vmax=top, aspect="auto", interpolation="none")
        label_layers(axes, values.sites)
        label_heads(axes, values.sites)
        axes.set_title(title if top is not None else f"{title} (0 to {np.nanmax(values.values):.2g})", fontsize=8.5)
        shares = shares if top is None else image
    if shares is not None:
        figure.colorbar(shares, ax=list(grid), location="bottom", shrink=0.4, aspect=30, pad=0.02).ax.tick_params(labelsize=7)
    return figure


def label_layers(axes: Axes, sites: tuple[Site, ...]) -> None:
    """A heat map's rows: layers, after their kind where there are several, at most about 20 of them named."""
    several = len({site.kind for site in sites}) > 1
    labels = [site.label.replace(".", " ") if several else site.label.split(".")[-1] for site in sites]
    every = -(-len(labels) // 20)
    axes.set_yticks(range(0, len(labels), every), labels[::every])
    axes.tick_params(axis="y", labelsize=7, length=2)
    axes.set_ylabel("" if several else "layer", fontsize=8)
    axes.spines[:].set_visible(False)


def label_heads(axes: Axes, sites: tuple[Site, ...]) -> None:
    """A heat map's columns: heads, at most about 6 of them named."""
    heads = max(site.gates for site in sites)
    axes.set_xticks(range(0, heads, -(-heads // 6)))
    axes.tick_params(axis="x", labelsize=7, length=2)
    axes.set_xlabel("head", fontsize=8)


@styled
def open_heads(course: Course, title: str) -> Figure:
    """Open heads over training: a line per kind above, a row per layer below."""
    by_site = course.by_site()
    edges = np.append(course.steps, course.steps[-1] + (course.steps[-1] - course.steps[-2] if len(course.steps) > 1 else 1))
    figure = Figure(figsize=(WIDTH, 2.6 + 0.17 * len(course.sites)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1 + 0.17 * len(course.sites)))
    kinds = list(dict.fromkeys(site.kind for site in course.sites))
    most = 1.0
    for index, kind in enumerate(kinds):
        members = [site.kind == kind for site in course.sites]
        look = line_style(index) | {"marker": None}
        total = by_site[:, members].sum(axis=1)
        most = max(most, float(total.max()))
        above.step(edges, np.append(total, total[-1]), where="post", linewidth=1.6, label=kind, **look)
    above.set(ylabel="open heads", title=title)
    above.set_ylim(0, 1.06 * most)
    above.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    above.grid(visible=True, axis="y")
    if len(kinds) > 1:
        above.legend()
    sizes = np.array([site.gates for site in course.sites])
    image = below.pcolormesh(
        edges, np.arange(len(sizes) + 1) - 0.5, (by_site / sizes).T, cmap=MAP, vmin=0, vmax=1, rasterized=True
    )
    label_layers(below, course.sites)
    for axes in (above, below):
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    above.tick_params(labelbottom=False)
    below.set_xlabel("optimiser step")
    below.invert_yaxis()
    figure.colorbar(image, ax=below, label="share open", aspect=12, pad=0.02)
    return figure


@styled
def kept_by_site(sites: tuple[Site, ...], counts: np.ndarray, ticks: list[str], *, axis: str, title: str) -> Figure:
    """Where the heads are that stay as budgets fall or prices rise: the share of each kind above, of each layer below.

    Args:
        sites: rows of the heat map.
        counts: gates that stay, ``[columns, sites]``.
        ticks: what each column is called.
        axis: what they are.
        title: of the picture.
    """
    sizes = np.array([site.gates for site in sites])
    kinds = list(dict.fromkeys(site.kind for site in sites))
    height, places = 1 + 0.19 * len(sites), np.arange(len(counts))
    figure = Figure(figsize=(WIDTH, height + (1.6 if len(kinds) > 1 else 0.6)), layout="constrained")
    if len(kinds) > 1:
        above, below = figure.subplots(2, 1, height_ratios=(2, height), sharex=True)
        for index, kind in enumerate(kinds):
            members = [site.kind == kind for site in sites]
            share = counts[:, members].sum(axis=1) / sizes[members].sum()
            above.plot(places, share, label=kind, markersize=4.5, **line_style(index))
        above.set(ylabel="share kept", ylim=(-0.04, 1.04))
        above.grid(visible=True, axis="y")
        above.legend()
    else:
        below = figure.subplots()
    figure.suptitle(title)
    shares = (counts / sizes).T
    image = below.imshow(shares, cmap=MAP, vmin=0, vmax=1, aspect="auto")
    for row, column in np.ndindex(*shares.shape):
        colour = "white" if shares[row, column] < 0.6 else "black"
        below.text(column, row, f"{counts[column, row]:.2g}", ha="center", va="center", fontsize=7, color=colour)
    label_layers(below, sites)
    below.set_xticks(places, ticks)
    below.set_xlabel(axis)
    figure.colorbar(image, ax=below, label="share kept", aspect=12, pad=0.02)
    return figure


@styled
def his_against_entropy(contents: Contents, kept: Values | None, method: str) -> Figure:
    """A point per head: HIS against attention entropy, coloured by layer, large where the method keeps the head."""
    his, entropy = contents.mean_score("his"), contents.mean_score("entropy")
    assert his is not None
    assert entropy is not None
    sizes = [site.gates for site in his.sites]
    layers = np.repeat([int(site.label.split(".")[-1]) for site in his.sites], sizes)
    kinds = np.repeat([site.kind for site in his.sites], sizes)
    inside = kept.values >= 0.5 if kept is not None else np.ones(len(layers), dtype=bool)
    figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(kinds))
    scale: dict[str, Any] = {"cmap": MAP, "vmin": 0, "vmax": max(1, layers.max()), "edgecolors": INK}
    for index, kind in enumerate(names):
        for chosen, word, size, line in ((True, "kept", 70, 1.5), (False, "not kept", 18, 0.4)):
            of = (kinds == kind) & (inside == chosen)
            look: dict[str, Any] = {"s": size, "linewidths": line, "marker": MARKERS[index]}
            image = axes.scatter(his.values[of], entropy.values[of], c=layers[of], **look, **scale)
            if kept is not None:
                label = f"{word} by {method}" + (f", {kind}" if len(names) > 1 else "")
                axes.scatter([], [], facecolors="none", edgecolors=INK, label=label, **look)
    if (his.values > 0).all() and his.values.max() > 10 * his.values.min():
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(round_numbers(his.values.min(), his.values.max())))
        axes.xaxis.set_minor_locator(NullLocator())  # its labels would be mathematical text, which names must not be
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel="HIS (raw)", ylabel="attention entropy (0 to 1)")
    axes.grid(visible=True)
    figure.colorbar(image, ax=axes, label="layer", aspect=25, pad=0.02, ticks=MaxNLocator(6, integer=True))
    if kept is not None:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def round_numbers(low: float, high: float) -> list[float]:
    """Three to seven numbers for a logarithmic axis over more than a decade: powers of ten, or with 3, or with 2 and 5 times
    those between."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [value for power in powers for digit in digits if low <= (value := digit * 10.0**power) <= high]
        if len(found) >= 3:
            break
    return found[:: -(-len(found) // 7)]


def _intervals(axes: Axes, positions: Any, rows: pd.DataFrame, metric: str, *, colour: str, across: bool = False) -> None:
    """The 95 % intervals, where the rows have them, beside what is drawn at the positions."""
    if not {"low", "high"} <= set(rows.columns) or rows["low"].isna().all():
        return
    low, high = shown(metric, rows["low"]), shown(metric, rows["high"])
    draw = axes.hlines if across else axes.vlines
    draw(positions, low, high, colors=colour, linewidth=1.1, alpha=0.75)


def _majority(axes: Axes, contents: Contents) -> None:
    """What always answering the most frequent class would score, where that is within the frame."""
    if contents.majority is None:
        return
    value, (bottom, top) = shown(contents.metric, contents.majority), axes.get_ylim()
    if bottom <= value <= top:
        axes.axhline(value, color=INK, linestyle=(0, (1, 3)), linewidth=1, label="majority class")


def _limit(axes: Axes, rows: pd.DataFrame, dense: pd.DataFrame, metric: str) -> None:
    """Frame the means; with few seeds an interval may be many times wider, and is cut by the frame then."""
    means = shown(metric, pd.concat([rows["mean"], dense["mean"]]).dropna())
    if not len(means):
        return
    room = 0.6 * max(float(means.max() - means.min()), 1e-3 * abs(float(means.max())), 1e-9)
    bottom, top = axes.get_ylim()
    most = 101.0 if metric in IN_PERCENT else np.inf  # a share of more than all is no result; a mark at 100 % has room
    axes.set_ylim(max(bottom, float(means.min()) - room), min(top, most, float(means.max()) + room))
