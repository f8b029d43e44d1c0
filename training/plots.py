"""The pictures of a run, drawn with matplotlib."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from gates.ranking import jaccard
from gates.sites import KINDS, AttentionSite

# Okabe and Ito's colours, distinguishable for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "osD^vP*X"


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
        image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto")
        axes.set(title=kind, xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(rows)), [str(layer) for layer, _ in rows])
        axes.set_xticks(range(grid.shape[1]))
    figure.colorbar(image, ax=figure.axes, label="gate")
    figure.suptitle(title)
    return figure


def quality_by_budget(curve: pd.DataFrame, comparison: pd.DataFrame, *, metric: str) -> Figure:
    """Quality against heads kept: a line per ranking post hoc, and points at the run's budget for settled models.

    Args:
        curve: columns method, heads, select_METRIC (mask only, selection split).
        comparison: columns method, stage, heads, select_METRIC.
        metric: such as ``accuracy``.
    """
    column = f"select_{metric}"
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (method, line) in enumerate(curve.groupby("method", sort=False)):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        axes.plot(line["heads"], line[column], color=colour, marker=marker, markersize=4, linewidth=1.2, label=str(method))
        settled = comparison[(comparison["method"] == method) & (comparison["stage"] == "settled")]
        axes.scatter(settled["heads"], settled[column], s=90, facecolors="none", edgecolors=colour, marker="o")
    dense = comparison[comparison["method"] == "dense"]
    if len(dense):
        axes.axhline(float(dense[column].iloc[-1]), color="grey", linestyle=":", label="dense control")
    axes.set(xlabel="heads kept", ylabel=f"{metric} (selection split)", title="Lines: mask only; rings: trained on")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    return figure


def mask_agreement(masks: dict[str, Tensor]) -> Figure:
    """Jaccard index of every pair of masks, beside what two random masks of this size would share."""
    names = list(masks)
    grid = np.array([[jaccard(masks[row], masks[column]) for column in names] for row in names])
    size = 1.5 + 0.55 * len(names)
    figure = Figure(figsize=(size + 1.2, size), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    for row, column in np.ndindex(grid.shape):
        shade = "white" if grid[row, column] < 0.6 else "black"
        axes.text(column, row, f"{grid[row, column]:.2f}", ha="center", va="center", color=shade, fontsize=8)
    first = next(iter(masks.values()))
    share = float(first.mean())
    axes.set_title(f"Heads in both masks over heads in either (chance: {share / (2 - share):.2f})", fontsize=9)
    figure.colorbar(image, ax=axes)
    return figure


def figure_image(figure: Figure) -> Image.Image:
    """A figure as a picture in memory, for loggers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    buffer.seek(0)
    return Image.open(buffer)
