"""The pictures of a run, drawn with matplotlib, and the style of all pictures."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from gates.scores.ranking import jaccard
from gates.sites import KINDS, AttentionSite
from training.stats.statistics import overlap

INK = "#1c1f23"
"""Colour of text, axes and the dense model; a page may replace it by the colour of its own text."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933")
"""Okabe and Ito's colours, distinguishable for colour-blind readers (their yellow, faint on white, is an olive here)."""
MARKERS = "osD^vP*X<>"
DASHES: tuple[Any, ...] = ("-", "--", (0, (1, 1.2)), "-.", (0, (5, 1, 1, 1, 1, 1)))
MAP = "cividis"
"""Of heat maps: perceptually uniform, and the same for colour-blind readers."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "text.parse_math": False,  # a name may hold dollar signs
}

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the project's style, to the end: ticks are made on drawing and would otherwise take the style of their day."""

    @wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once, not again for every file
        return figure

    return wrapped


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this index; their periods differ, so the first 70 lines all do."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


@styled
def gate_heat_map(sites: tuple[AttentionSite, ...], values: Tensor, *, title: str) -> Figure:
    """Layer x head pictures of a value per head in [0, 1], one panel per kind of attention."""
    parts = list(zip(sites, values.split([site.heads for site in sites]), strict=True))
    kinds = [kind for kind in KINDS if any(site.kind == kind for site in sites)]
    figure = Figure(figsize=(1.2 + 3.6 * len(kinds), 1.5 + 0.35 * max(1, len(parts) // len(kinds))), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rows = [(site.layer, part) for site, part in parts if site.kind == kind]
        grid = np.full((len(rows), max(len(part) for _, part in rows)), np.nan)
        for row, (_, part) in enumerate(rows):
            grid[row, : len(part)] = part.numpy()
        image = axes.imshow(grid, cmap=MAP, vmin=0, vmax=1, aspect="auto")
        axes.set(title=kind, xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(rows)), [str(layer) for layer, _ in rows])
        axes.set_xticks(range(grid.shape[1]))
    figure.colorbar(image, ax=figure.axes, label="gate")
    figure.suptitle(title)
    return figure


@styled
def quality_by_budget(curve: pd.DataFrame, comparison: pd.DataFrame, *, metric: str) -> Figure:
    """Quality against heads kept: a line per ranking post hoc, and points at the run's budget for retrained models.

    Args:
        curve: columns method, heads, select_METRIC (mask only, selection split).
        comparison: columns method, stage, heads, select_METRIC.
        metric: such as ``accuracy``.
    """
    column = f"select_{metric}"
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (method, line) in enumerate(curve.groupby("method", sort=False)):
        style = line_style(index)
        axes.plot(line["heads"], line[column], **style, markersize=4, linewidth=1.2, label=str(method))
        retrained = comparison[(comparison["method"] == method) & (comparison["stage"] == "retrained")]
        ring = {"s": 90, "facecolors": "none", "edgecolors": style["color"], "marker": style["marker"]}
        axes.scatter(retrained["heads"], retrained[column], **ring)
    dense = comparison[comparison["method"] == "dense"]
    if len(dense):
        axes.axhline(float(dense[column].iloc[-1]), color="grey", linestyle=":", label="dense control")
    axes.set(
        xlabel="heads kept", ylabel=f"{metric} (selection split)", title="Lines: mask only; large open markers: trained on"
    )
    axes.legend(fontsize=7, ncols=2)
    axes.grid(visible=True)
    return figure


@styled
def mask_agreement(masks: dict[str, Tensor], kinds: Tensor | None = None) -> Figure:
    """Jaccard index of every pair of masks, beside what two random masks of this size would share.

    Args:
        masks: 0/1 ``[gates]``, all of one budget.
        kinds: of each gate as a number ``[gates]``, if that budget is one per kind: random masks keep as many of each then.
    """
    names = list(masks)
    grid = np.array([[jaccard(masks[row], masks[column]) for column in names] for row in names])
    any_mask = next(iter(masks.values())).cpu().int().numpy()
    _, chance = overlap(any_mask, any_mask, None if kinds is None else kinds.cpu().numpy())
    return agreement_matrix(names, grid, title=f"Heads in both masks over heads in either\n(by chance: {chance:.2f})")


@styled
def agreement_matrix(names: list[str], grid: np.ndarray, *, title: str) -> Figure:
    """Agreement of methods in [0, 1] with its numbers, ``[names, names]``; NaN where there is none."""
    size = max(3.2, 1.5 + 0.5 * len(names))
    figure = Figure(figsize=(size + 1.0, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap=MAP, vmin=0, vmax=1, interpolation="none")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.spines[:].set_visible(False)
    for row, column in zip(*np.nonzero(~np.isnan(grid)), strict=True):
        shade = "#ffffff" if grid[row, column] < 0.5 else "#000000"
        axes.text(column, row, f"{grid[row, column]:.2f}", ha="center", va="center", color=shade, fontsize=8)
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def figure_image(figure: Figure) -> Image.Image:
    """A figure as a picture in memory, for loggers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    buffer.seek(0)
    return Image.open(buffer)
