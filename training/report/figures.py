"""The pictures of a report, each drawn from what a directory holds."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from gates.errors import GateError
from gates.files import is_partial, replacing
from training.config.comparison import is_post_hoc
from training.plotting import (
    COLOURS,
    INK,
    MAP,
    MARKERS,
    label_ends,
    legend_beside,
    line_style,
    method_styles,
    spread_widely_,
    styled,
)
from training.report.contents import Course, ReportData, Site, Values, is_dense
from training.runs.directory import LOOKED_AT, check_output
from training.stats.numbers import IN_PERCENT, counted, listed, shown, unit
from training.truth.tables import smallest_budgets, with_program

WIDTH = 4.6
"""Inches of most pictures: at this width their text is as large as a phone's screen allows."""
KEPT = LinearSegmentedColormap.from_list("kept", ["#e3e8ee", "#7fb2d9", "#0b5cad", "#08264d"])
"""Of masks: pale where a head goes, dark where it stays, and apart from the paper of light and of dark pages."""
COLUMNS = 4
"""Heat maps side by side."""


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


@styled
def masks_by_method(kept: dict[str, Values], *, unit: str = "head", seeds: int = 1) -> Figure:
    """Which heads each method keeps, layer x head side by side, and last how many of the methods keep each.

    Args:
        kept: method to the share of seeds that keep each head.
        unit: what a cell is.
        seeds: of each method; with several, a cell's shade is the share of them.
    """
    panels = dict(kept)
    if len(kept) > 1 and len({values.sites for values in kept.values()}) == 1:
        sites = next(iter(kept.values())).sites
        panels["mean of the methods"] = Values(sites, np.mean([values.values for values in kept.values()], axis=0))
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    rows = max(len(values.sites) for values in panels.values())
    figure = Figure(figsize=(1.9 * columns + 0.3, 0.85 + lines * (0.62 + 0.14 * max(5, rows))), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flatten()[len(panels) :]:
        axes.set_axis_off()
    for place, (axes, (method, values)) in enumerate(zip(grid.flatten(), panels.items(), strict=False)):
        image = axes.imshow(values.grid(), cmap=KEPT, vmin=0, vmax=1, aspect="auto", interpolation="none")
        label_layers(axes, values.sites)
        label_heads(axes, values.sites)
        across, down = max(site.gates for site in values.sites), len(values.sites)
        axes.vlines(np.arange(across - 1) + 0.5, -0.5, down - 0.5, colors="white", linewidth=0.8)
        axes.hlines(np.arange(down - 1) + 0.5, -0.5, across - 0.5, colors="white", linewidth=0.8)
        axes.set_title(method, fontsize=8.5)
        if place + columns < len(panels):
            axes.set_xlabel("")
        if place % columns:
            axes.set_ylabel("")
    label = f"share of {seeds} seeds that keep the {unit}" if seeds > 1 else f"1: the {unit} is kept"
    scale = figure.colorbar(image, ax=list(grid.flatten()), location="bottom", shrink=0.4, aspect=30, pad=0.02)
    scale.set_label(label, fontsize=8)
    scale.ax.tick_params(labelsize=7)
    return figure


def label_layers(axes: Axes, sites: tuple[Site, ...]) -> None:
    """A heat map's rows: layers, after their kind where there are several, with a line between kinds; at most about 20 of them
    are named."""
    several = len({site.kind for site in sites}) > 1
    for row, (above, below) in enumerate(pairwise(sites)):
        if above.kind != below.kind:
            axes.axhline(row + 0.5, color="white", linewidth=2)
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
def his_against_entropy(contents: ReportData, kept: Values | None, method: str) -> Figure:
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


# The pictures beside a page. Each says of itself that a report has drawn it, and no other file is replaced or removed.

MARK = "drawn by head-gates report"
"""Near the beginning of every picture."""


def write_pictures(pictures: Mapping[Path, bytes]) -> None:
    """Write pictures, all of them or, where one may not be written, none.

    Raises:
        GateError: if something else than an earlier picture has the name of one.
    """
    for path in pictures:
        check_output(path, MARK, "picture of a report")
    for path, content in pictures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(content)


def check_own_folder(folder: Path) -> None:
    """Whether a folder that a command keeps for its pictures holds nothing else.

    Raises:
        GateError: if it does, or leads elsewhere.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise GateError(f"{str(folder)!r} is no folder of its own for pictures; remove it, or give another --run_dir")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not is_partial(path) and not _is_own(path):
            raise GateError(
                f"{str(path)!r} was not drawn by this version of this command, which keeps its pictures there; move it, or "
                "give another --run_dir"
            )


def remove_pictures(folder: Path) -> None:
    """Remove a folder's pictures that a report has drawn."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if _is_own(path):
            path.unlink()


def _is_own(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(LOOKED_AT)


# Figures as files and as parts of a page.

SVG: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "head-gates", "font.family": ["DejaVu Sans"]}
"""Text stays text (small, searchable, in the reader's font), and the same figure is the same file."""
NO_METADATA: dict[str, str | None] = {"Date": None, "Creator": None, "Format": None, "Type": None}


def picture_files(figure: Figure, name: str) -> dict[str, bytes]:
    """The content of ``NAME.png`` and ``NAME.svg``, on white, with the mark of a report's pictures."""
    drawn, marks = {}, {"png": {"Software": MARK}, "svg": NO_METADATA | {"Creator": MARK}}
    for form, metadata in marks.items():
        buffer = io.BytesIO()
        with matplotlib.rc_context(SVG):
            figure.savefig(buffer, format=form, dpi=150, facecolor="white", metadata=metadata)
        drawn[f"{name}.{form}"] = buffer.getvalue()
    return drawn


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an element of a page: transparent, its ink in the page's text colour, its ids under the given name.

    Args:
        figure: drawn in the project's style, whose ink it looks for.
        name: unique in the page.
        label: text in place of the picture; goes into an attribute and must come escaped.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(SVG):
        figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style type=\"text/css\">.*?</style>", "", svg, count=1, flags=re.DOTALL)  # it would hold for the whole page
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg, referred = re.sub(r">\s+<", "><", svg), set(re.findall(r'#([^")]+)', svg))
    # Nothing refers to names of groups and of images, and equal images would have equal ones.
    svg = re.sub(r' id="([^"]+)"', lambda name: name[0] if name[1] in referred else "", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'="[^"]*"', lambda value: re.sub(r"(\.\d\d)\d+", r"\1", value[0]), svg)  # 1/100 point is enough
    width = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    size = f' style="max-width: {float(width[1]) * 1.5:.0f}px"' if width else ""
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", svg))
    return svg.replace("<svg", f'<svg class="chart" role="img" aria-label="{label}"{size}', 1)


# Pictures of quality: the main metric against the heads that are kept, and by method.

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
QUALITY_WIDTH = 4.4
"""Inches of a picture without its legend: at this width its text is as large as a phone's screen allows."""
LETTER = 0.07
"""Inches of a letter of a legend, about."""
FEW = 4
"""Methods whose lines bear their names; more are named in a legend."""
BARS = "\nbars: 95 % interval of the mean over seeds"
"""Below the axis, where no legend is."""
DENSE, MAJORITY = "dense", "majority class"


@styled
def quality_against_heads(contents: ReportData, stage: str) -> Figure:
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


def draw_quality(axes: Axes, contents: ReportData, stage: str, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
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


def what_is_drawn(contents: ReportData, stage: str) -> str:
    """What lines and bands of :func:`draw_quality` are."""
    seeds = _seeds(contents, stage)
    most = int(seeds["count"].max()) if len(seeds) else 0
    return f"lines: means, bands: lowest to highest of {counted(most, 'seed')}" if most > 1 else "of one seed" * (most == 1)


def _of_stage(contents: ReportData, stage: str) -> pd.DataFrame:
    """The means of a stage, but for the dense model's."""
    rows = contents.summary[contents.summary["stage"] == stage]
    return rows[~is_dense(rows)].dropna(subset=["mean"])


@styled
def quality_of_methods(contents: ReportData) -> Figure:
    """The main metric on the test split at the one budget: open markers post hoc, filled ones retrained, 95 % intervals."""
    metric = contents.metric
    rows = contents.summary[~is_dense(contents.summary)]
    last = rows[rows["stage"] == rows["stage"].iloc[-1]].set_index("method")["mean"]
    sign = -1 if contents.lower_is_better else 1
    methods = sorted(contents.methods, key=lambda method: sign * last.get(method, -sign * np.inf))
    figure = Figure(figsize=(QUALITY_WIDTH + LETTER * 22, 1.2 + 0.26 * len(methods)), layout="constrained")
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
def curve_of_run(contents: ReportData) -> Figure:
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
    return Figure(figsize=(QUALITY_WIDTH + beside, max(height, 0.6 + 0.19 * (len(methods) + 2))), layout="constrained")


def _seeds(contents: ReportData, stage: str) -> pd.DataFrame:
    """The lowest and the highest seed of each method and budget: columns method, budget, min, max, count."""
    rows, main = contents.comparison, f"test_{contents.metric}"
    if not {"stage", "method", "budget", main} <= set(rows):
        return pd.DataFrame(columns=["method", "budget", "min", "max", "count"])
    of_stage = rows[(rows["stage"] == stage) & ~is_dense(rows)]
    return of_stage.groupby(["method", "budget"], as_index=False)[main].agg(["min", "max", "count"])


def _majority(axes: Axes, contents: ReportData) -> bool:
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


# Known truth as a table of ticks: which method found the heads that are necessary by construction.

RECOVERY_COLUMNS = ("program", "method", "seed", "recovered", "precision", "recall", "smallest")
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
        :data:`RECOVERY_COLUMNS`: recovered, precision and recall where the budget is the number of necessary functions; the
        smallest budget from which on the function survives at every larger one, NaN where there is none.

    Raises:
        GateError: for a table without these columns.
    """
    if set(RECOVERY_COLUMNS) <= set(truth):
        return truth[list(RECOVERY_COLUMNS)]
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
        table: with :data:`RECOVERY_COLUMNS`, ``smallest`` may lack; ``recovered`` is a truth value, the others are numbers.
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
