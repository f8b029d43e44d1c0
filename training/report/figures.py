"""The pictures of a report, each drawn from what a directory holds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from training.plotting import INK, MAP, MARKERS, line_style, styled
from training.report.contents import Contents, Course, Site, Values

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
