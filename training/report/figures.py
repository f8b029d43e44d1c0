"""The pictures of a report, each drawn from the tables of a directory."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from gates.errors import GateError
from gates.files import is_partial, replacing
from training.config.comparison import is_post_hoc
from training.plotting import (
    COLOURS,
    INK,
    LETTER,
    MAP,
    MARKERS,
    legend_below,
    line_style,
    method_styles,
    spread_widely_,
    styled,
)
from training.report.captions import STAGE_TITLES
from training.report.contents import GateHistory, ReportData, Sites, Values, is_dense
from training.runs.directory import LOOKED_AT, check_output
from training.stats.numbers import IN_PERCENT, counted, listed, shown, unit
from training.truth.tables import smallest_budgets, tick_or_count, with_program

WIDTH = 4.6
"""Inches of most pictures: at this width their text is as large as a phone's screen allows."""
KEPT = LinearSegmentedColormap.from_list("kept", ["#e3e8ee", "#7fb2d9", "#0b5cad", "#08264d"])
"""Of masks: pale where a head goes, dark where it stays, and apart from the paper of light and of dark pages."""
COLUMNS = 4
"""Heat maps side by side."""


def masks_by_method(kept: dict[str, Values], *, unit: str = "head", seeds: int = 1) -> Figure:
    """Draw which heads each method keeps, layer x head side by side, and last the mean of the methods.

    Args:
        kept: For each method, the share of seeds that keep each head.
        seeds: The number of seeds of each method. With several, a cell's shade is the share of them.
    """
    panels = dict(kept)
    if len(kept) > 1 and len({values.sites for values in kept.values()}) == 1:
        sites = next(iter(kept.values())).sites
        panels["mean of the methods"] = Values(sites, np.mean([values.values for values in kept.values()], axis=0))
    label = f"share of {seeds} seeds that keep the {unit}" if seeds > 1 else f"1: the {unit} is kept"
    return heat_maps(panels, label=label, colours=KEPT)


@styled
def heat_maps(panels: dict[str, Values], *, label: str, top: float | None = 1.0, colours: str | Colormap = MAP) -> Figure:
    """Draw layer x head pictures side by side.

    Args:
        label: The name of the values; "" for no colour scale.
        top: The top of the scale. None takes the largest value of each panel, and says so in its title.
    """
    columns = min(COLUMNS, len(panels))
    lines = -(-len(panels) // columns)
    rows = max(len(values.sites) for values in panels.values())
    figure = Figure(figsize=(1.9 * columns + 0.3, 0.85 + lines * (0.62 + 0.14 * max(5, rows))), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for place, (axes, (title, values)) in enumerate(zip(grid, panels.items(), strict=False)):
        image = heat_map(axes, values, colours=colours, top=top)
        across, down = max(site.gates for site in values.sites), len(values.sites)
        axes.vlines(np.arange(across - 1) + 0.5, -0.5, down - 0.5, colors="white", linewidth=0.8)
        axes.hlines(np.arange(down - 1) + 0.5, -0.5, across - 0.5, colors="white", linewidth=0.8)
        axes.set_title(title if top is not None else f"{title} (0 to {np.nanmax(values.values):.2g})", fontsize=8.5)
        if place + columns < len(panels):
            axes.set_xlabel("")
        if place % columns:
            axes.set_ylabel("")
    if label:
        scale = figure.colorbar(image, ax=list(grid), location="bottom", shrink=0.4, aspect=30, pad=0.02)
        scale.set_label(label, fontsize=8)
        scale.ax.tick_params(labelsize=7)
    return figure


def heat_map(axes: Axes, values: Values, *, colours: str | Colormap = MAP, top: float | None = 1.0) -> AxesImage:
    """Draw a layer x head picture with its labels."""
    image = axes.imshow(values.grid(), cmap=colours, vmin=0, vmax=top, aspect="auto", interpolation="none")
    heads = max(site.gates for site in values.sites)
    axes.set_xticks(range(0, heads, -(-heads // 6)))  # at most about 6 heads are named
    axes.tick_params(axis="x", labelsize=7, length=2)
    axes.set_xlabel("head", fontsize=8)
    label_layers(axes, values.sites)
    return image


def label_layers(axes: Axes, sites: Sites) -> None:
    """Label the rows of a heat map: layers, after their kind where there are several, with a line between kinds."""
    several = len({site.kind for site in sites}) > 1
    for row, (above, below) in enumerate(pairwise(sites)):
        if above.kind != below.kind:
            axes.axhline(row + 0.5, color="white", linewidth=2)
    labels = [site.label.replace(".", " ") if several else site.label.split(".")[-1] for site in sites]
    every = -(-len(labels) // 20)  # at most about 20 layers are named
    axes.set_yticks(range(0, len(labels), every), labels[::every])
    axes.tick_params(axis="y", labelsize=7, length=2)
    axes.set_ylabel("" if several else "layer", fontsize=8)
    axes.spines[:].set_visible(False)


@styled
def open_heads(history: GateHistory, title: str) -> Figure:
    """Draw open heads over training: a line per kind above, a row per layer below."""
    by_site, sizes = history.by_site(), np.array([site.gates for site in history.sites])
    edges = np.append(
        history.steps, history.steps[-1] + (history.steps[-1] - history.steps[-2] if len(history.steps) > 1 else 1)
    )
    figure = Figure(figsize=(WIDTH, 2.6 + 0.17 * len(history.sites)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1 + 0.17 * len(history.sites)))
    kinds = list(dict.fromkeys(site.kind for site in history.sites))
    for index, kind in enumerate(kinds):
        total = by_site[:, [site.kind == kind for site in history.sites]].sum(axis=1)
        look = line_style(index) | {"marker": None}
        above.step(edges, np.append(total, total[-1]), where="post", linewidth=1.6, label=kind, **look)
    above.set(ylabel="open heads", title=title)
    above.set_ylim(bottom=0)
    above.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    above.grid(visible=True, axis="y")
    if len(kinds) > 1:
        above.legend()
    image = below.pcolormesh(
        edges, np.arange(len(sizes) + 1) - 0.5, (by_site / sizes).T, cmap=MAP, vmin=0, vmax=1, rasterized=True
    )
    label_layers(below, history.sites)
    for axes in (above, below):
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    above.tick_params(labelbottom=False)
    below.set_xlabel("optimiser step")
    below.invert_yaxis()
    figure.colorbar(image, ax=below, label="share open", aspect=12, pad=0.02)
    return figure


@styled
def kept_by_site(sites: Sites, counts: np.ndarray, ticks: list[str], *, axis: str, title: str) -> Figure:
    """Draw where heads stay as budgets fall or prices rise: the share of each kind above, of each layer below.

    Args:
        counts: The gates that stay, ``[columns, sites]``.
        axis: The name of the columns.
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


# The picture files of a page. Each has a mark that a report has drawn it, and no other file is replaced or removed.

MARK = "drawn by head-gates report"
"""Near the beginning of every picture."""


def write_pictures(pictures: Mapping[Path, bytes]) -> None:
    """Write pictures, all of them or, where one may not be written, none."""
    for path in pictures:
        check_output(path, MARK, "picture of a report")
    for path, content in pictures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(content)


def check_own_folder(folder: Path) -> None:
    """Raise :class:`GateError` if a command's folder of pictures holds something else, or leads elsewhere."""
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
    """Return the content of ``NAME.png`` and ``NAME.svg``, on white, with the mark of a report's pictures."""
    drawn, marks = {}, {"png": {"Software": MARK}, "svg": NO_METADATA | {"Creator": MARK}}
    for form, metadata in marks.items():
        buffer = io.BytesIO()
        with matplotlib.rc_context(SVG):
            figure.savefig(buffer, format=form, dpi=150, transparent=True, facecolor="white", metadata=metadata)
        drawn[f"{name}.{form}"] = buffer.getvalue()
    return drawn


def inline_svg(svg: str, name: str) -> str:
    """Return a drawn SVG as an element of a page, labelled by its caption ``NAME-caption``.

    It is transparent, its ink has the page's text colour, and its ids begin with the name.
    """
    svg = svg[svg.index("<svg") :].replace("fill: #ffffff", "fill: none", 1)  # the background comes first
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
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
    return svg.replace("<svg", f'<svg class="chart" role="img" aria-labelledby="{name}-caption"{size}', 1)


# Pictures of quality: the main metric against the heads that are kept, and by method.

QUALITY_WIDTH = 4.4
"""Inches of a picture of quality: at this width its text is as large as a phone's screen allows."""
DENSE, MAJORITY = "dense", "majority class"


@styled
def quality_against_heads(contents: ReportData, stage: str) -> Figure:
    """Draw the main metric on the test split as heads are taken away, for one stage.

    There is a line per method through its means over seeds, a band from its lowest to its highest seed, and the dense model.
    Budgets are equally far apart, since they mostly halve.
    """
    figure = Figure(figsize=(QUALITY_WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    ends = draw_quality(axes, contents, stage, method_styles(contents.methods))
    axes.set_title(f"{STAGE_TITLES.get(stage, stage)}\n{what_is_drawn(contents, stage)}", fontsize=8.5)
    legend_below(figure, axes, sorted(ends, key=lambda name: -ends[name]))
    return figure


def draw_quality(axes: Axes, contents: ReportData, stage: str, styles: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Draw :func:`quality_against_heads` on given axes, without title and names, in these styles by method.

    Returns:
        The value at the end of each line, by its name.
    """
    metric, of_stage = contents.metric, contents.summary[contents.summary["stage"] == stage]
    rows, dense = of_stage[~is_dense(of_stage)].dropna(subset=["mean"]), of_stage[of_stage["method"] == DENSE]
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
    _limit(axes, shown(metric, pd.concat([rows["mean"], dense["mean"]]).dropna()), metric)
    if contents.lower_is_better:
        spread_widely_(axes, [*rows["mean"], *dense["mean"].dropna()])
    bottom, top = axes.get_ylim()
    if contents.majority is not None and bottom <= (value := shown(metric, contents.majority)) <= top:
        axes.axhline(value, color=INK, linestyle=(0, (1, 3)), linewidth=1, label=MAJORITY)
        ends[MAJORITY] = value
    ticks, title = contents.axis(budgets)
    axes.set_xticks(range(len(budgets)), ticks)
    axes.set(xlabel=title, ylabel=f"test {metric}{unit(metric)}")
    axes.set_xlim(len(budgets) - 0.85, -0.15)  # heads are taken away from left to right
    axes.grid(visible=True, axis="y")
    return ends


def what_is_drawn(contents: ReportData, stage: str) -> str:
    """Say what lines and bands of :func:`draw_quality` are."""
    seeds = _seeds(contents, stage)
    most = int(seeds["count"].max()) if len(seeds) else 0
    return f"lines: means, bands: lowest to highest of {counted(most, 'seed')}" if most > 1 else "of one seed" * (most == 1)


@styled
def quality_of_methods(contents: ReportData) -> Figure:
    """Draw the main metric on the test split at one budget, with intervals: open markers post hoc, filled ones retrained."""
    metric, rows = contents.metric, contents.summary[~is_dense(contents.summary)]
    last = contents.best_first(rows[rows["stage"] == rows["stage"].iloc[-1]].dropna(subset=["mean"]))["method"]
    methods = [*(name for name in contents.methods if name not in set(last)), *reversed(list(last))]  # from the worst
    width = QUALITY_WIDTH + LETTER * max(0, max(map(len, methods)) - 16)
    figure = Figure(figsize=(width, 1.2 + 0.26 * len(methods)), layout="constrained")
    axes = figure.subplots()
    for index, stage in enumerate(contents.stages):
        of_stage, colour, post_hoc = rows[rows["stage"] == stage], COLOURS[index], is_post_hoc(stage)
        y = np.array([methods.index(method) for method in of_stage["method"]]) + 0.12 * (index - (len(contents.stages) - 1) / 2)
        low, high = shown(metric, of_stage["low"]), shown(metric, of_stage["high"])
        axes.hlines(y, low, high, colors=colour, linewidth=1.1, alpha=0.75)
        fill: dict[str, Any] = {"facecolors": "none" if post_hoc else colour, "edgecolors": colour}
        axes.scatter(shown(metric, of_stage["mean"]), y, marker=MARKERS[index], s=32, label=stage, zorder=3, **fill)
        for value in contents.summary.loc[(contents.summary["method"] == DENSE) & (contents.summary["stage"] == stage), "mean"]:
            dashes = ":" if post_hoc else "--"
            axes.axvline(shown(metric, float(value)), color=INK, linestyle=dashes, linewidth=1, label=f"dense, {stage}")
    if contents.lower_is_better:
        spread_widely_(axes, rows["mean"].dropna(), axis="x")
    axes.set_yticks(range(len(methods)), methods)
    bars = "\nbars: 95 % interval of the mean over seeds" if rows["low"].notna().any() else ""
    axes.set(xlabel=f"test {metric}{unit(metric)}{bars}")
    axes.grid(visible=True)
    legend_below(figure, axes)
    return figure


def _seeds(contents: ReportData, stage: str) -> pd.DataFrame:
    """Return the lowest and the highest seed of each method and budget: columns method, budget, min, max, count."""
    rows, main = contents.comparison, f"test_{contents.metric}"
    if not {"stage", "method", "budget", main} <= set(rows):
        return pd.DataFrame(columns=["method", "budget", "min", "max", "count"])
    of_stage = rows[(rows["stage"] == stage) & ~is_dense(rows)]
    return of_stage.groupby(["method", "budget"], as_index=False)[main].agg(["min", "max", "count"])


def _limit(axes: Axes, means: pd.Series, metric: str) -> None:
    """Frame the means; a band of seeds that is many times wider is cut by the frame."""
    if not len(means):
        return
    least, most = float(means.min()), float(means.max())
    room = 0.6 * max(most - least, 1e-3 * abs(most), 1e-9)
    bottom, top = axes.get_ylim()
    limit = 101.0 if metric in IN_PERCENT else np.inf  # a mark at 100 % has room, and nothing is above it
    axes.set_ylim(max(bottom, least - room), min(top, limit, most + room))


# Known truth as a table of ticks: which method found the heads that are necessary by construction.

MEANS = ("exact", "precision", "recall")
"""Columns of means at the right of the ticks."""


def recoveries(truth: pd.DataFrame) -> pd.DataFrame:
    """Return one row per program, method and seed of ``truth.csv``.

    Args:
        truth: A row per seed, method and budget with ``needed`` (necessary functions), ``exact``, ``precision``, ``recall`` and
            ``survives``, and ``program`` where there are several.

    Returns:
        Columns as in the table. ``recovered``, ``precision`` and ``recall`` are where the budget is the number of necessary
        functions. ``smallest`` is the budget from which on the function survives at every larger one, NaN without one.
    """
    lacking = {"seed", "method", "budget", "needed", "exact", "precision", "recall", "survives"} - set(truth)
    if lacking:
        raise GateError(f"a table of known truth has no column {listed(sorted(map(repr, lacking)))}; write the results again")
    truth, key = with_program(truth), ["program", "method", "seed"]
    smallest = smallest_budgets(truth)[[*key, "smallest"]]
    at_needed = truth[truth["budget"] == truth["needed"]].rename(columns={"exact": "recovered"})
    return at_needed[[*key, "recovered", "precision", "recall"]].merge(smallest, on=key, how="left")


@styled
def ticks(table: pd.DataFrame) -> Figure:
    """Draw methods (rows, the best first) by programs (columns), and at the right the means over programs.

    A tick is where every seed found exactly the necessary heads, a cross where none did, otherwise it says how many did. Small
    below is the smallest budget at which the function survives, the mean over seeds.
    """
    shares = _shares(table)
    methods, programs = list(shares.index), list(shares.columns)
    table = table.assign(exact=table["recovered"].astype(float))
    by_method = table.groupby("method")[list(MEANS)].mean().loc[methods]
    cells = table.groupby(["method", "program"])
    found, seeds, smallest = cells["exact"].sum(), cells["exact"].size(), cells["smallest"].mean()
    width = 0.5 + 0.075 * max(map(len, map(str, methods))) + 0.62 * len(programs) + 0.75 * len(MEANS)
    figure = Figure(figsize=(width, 1.5 + 0.34 * len(methods)), layout="constrained")
    axes = figure.subplots()
    grid = np.hstack([shares.to_numpy(), np.full((len(methods), 1 + len(MEANS)), np.nan)])
    axes.imshow(grid, cmap=KEPT, vmin=0, vmax=1.6, aspect="auto", interpolation="none")  # so that ticks are seen on the darkest
    places = [len(programs) + 1 + place for place in range(len(MEANS))]
    for key, count in found.items():
        method, program = cast(tuple[str, str], key)
        row, column, of = methods.index(method), programs.index(program), int(seeds[method, program])
        dark = "white" if count / of > 0.75 else "#1c1f24"
        survives = bool(np.isfinite(smallest[method, program]))
        mark = tick_or_count(int(count), of)
        axes.text(column, row - 0.12 * survives, mark, ha="center", va="center", color=dark, fontsize=9)
        if survives:
            axes.text(column, row + 0.3, f"{smallest[method, program]:.3g}", ha="center", va="center", color=dark, fontsize=6)
    for row, means in enumerate(by_method.to_numpy()):
        for place, mean in zip(places, means, strict=True):
            axes.text(place, row, f"{mean:.2f}", ha="center", va="center", fontsize=8)
    axes.hlines(np.arange(len(methods) - 1) + 0.5, -0.5, len(programs) - 0.5, colors="white", linewidth=1.2)
    axes.vlines(np.arange(len(programs) - 1) + 0.5, -0.5, len(methods) - 0.5, colors="white", linewidth=1.2)
    axes.set_yticks(range(len(methods)), methods)
    axes.set_xticks([*range(len(programs)), *places], [*programs, *MEANS], rotation=35, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    below = "; small: fewest heads with which it survives" if smallest.notna().any() else ""
    axes.set_title(f"exactly the necessary heads found ({counted(int(seeds.max()), 'seed')}{below})", fontsize=8.5)
    return figure


def caption(table: pd.DataFrame) -> str:
    """Say which method recovers most, and which recover nothing."""
    shares = _shares(table)
    every = (shares == 1).sum(axis=1)
    best = [str(method) for method in every.index[every == every.max()]]
    none = [str(method) for method in shares.index[(shares.fillna(0) == 0).all(axis=1)]]
    programs = counted(shares.shape[1], "program")
    text = f"Exactly the necessary heads in every seed: {listed(best)} in {every.max()} of {programs}."
    return text + (f" In none: {listed(none)}." if none else "")


def _shares(table: pd.DataFrame) -> pd.DataFrame:
    """Return the share of seeds with exact recovery, ``[methods, programs]``, methods by their mean."""
    of_cells = table.assign(recovered=table["recovered"].astype(float)).groupby(["method", "program"], sort=False)["recovered"]
    shares = of_cells.mean().unstack("program")[list(dict.fromkeys(table["program"]))]
    shares = shares.loc[list(dict.fromkeys(table["method"]))]
    return shares.loc[shares.mean(axis=1).sort_values(ascending=False, kind="stable").index]
