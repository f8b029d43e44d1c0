"""The pictures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.colors
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from gates.attention.sites import AttentionSite
from training.analysis.model import Measure
from training.plotting import COLOURS, MAP, MARKERS, draw_by_kind, line_style, styled


@styled
def effect_map(sites: Sequence[AttentionSite], change: Tensor, significant: Tensor, *, measure: Measure) -> Figure:
    """Draw the change of the metric when each head ``[heads]`` is removed alone, layer x head.

    Blue is a gain. A star marks heads whose change is significant ``[heads]``.
    """
    points = measure.scale * change.numpy()
    limit = max(float(np.abs(points).max()), 1e-3)

    def draw(axes: Axes, grid: np.ndarray, stars: np.ndarray) -> None:
        axes.imshow(grid, cmap="RdBu" if measure.sign > 0 else "RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        for row, head in zip(*np.nonzero(np.nan_to_num(stars)), strict=True):
            shade = "white" if abs(grid[row, head]) > 0.5 * limit else "black"
            axes.text(head, row, "*", ha="center", va="center", color=shade)

    title = "one head removed at a time; * significant"
    figure = draw_by_kind(sites, draw, points, significant.numpy(), title=title, width=1.6)
    label = f"change of test {measure.name}{' (points)' * (measure.sign > 0)}"
    figure.colorbar(figure.axes[0].images[0], ax=figure.axes, label=label)
    return figure


@styled
def causal_map(sites: Sequence[AttentionSite], roles: Tensor, agreement: Tensor, *, names: Sequence[str]) -> Figure:
    """Draw each head's role ``[heads]``, its place in ``names``, layer x head; pale where agreement ``[heads]`` is low."""
    colours = np.array([matplotlib.colors.to_rgb(colour) for colour in (COLOURS[0], "0.75", COLOURS[1])])

    def draw(axes: Axes, grid: np.ndarray, agreed: np.ndarray) -> None:
        shades, known = np.zeros((*grid.shape, 4)), ~np.isnan(grid)
        shades[known, :3] = colours[grid[known].astype(int)]
        shades[known, 3] = agreed[known]
        axes.imshow(shades, aspect="auto")

    title = "what each head does to the task; pale where seeds disagree"
    figure = draw_by_kind(sites, draw, roles.numpy(), agreement.numpy(), title=title)
    patches = [Patch(color=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    return figure


@styled
def scatter(table: pd.DataFrame, panels: Sequence[tuple[str, str, Mapping[str, str]]]) -> Figure:
    """Draw a point per gate, in the colour of its kind of attention.

    Args:
        table: A row per gate.
        panels: For each panel the columns to draw across and up, and its ``title``, ``xlabel`` and ``ylabel``.
    """
    figure = Figure(figsize=(4.2 * len(panels), 4.2), layout="constrained")
    for axes, (across, up, words) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for index, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
            axes.scatter(rows[across], rows[up], s=18, color=COLOURS[index], marker=MARKERS[index], label=str(kind))
        axes.set(**words)
        axes.grid()
    figure.axes[0].legend(fontsize=8)
    return figure


@styled
def quality_by_kind(table: pd.DataFrame, *, measure: Measure) -> Figure:
    """Draw the metric against the share of heads pruned: a colour per kind, one-shot solid and iterative dashed."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (kind, of_kind) in enumerate(table.groupby("kind", sort=False)):
        for schedule, line in of_kind.groupby("schedule", sort=False):
            share = 100 * line["pruned"] / line["left"].max()
            style = line_style(index) | {"linestyle": "-" if schedule == "one-shot" else "--", "markersize": 4}
            axes.plot(share, measure.scale * line["metric"], label=f"{kind}, {schedule}", **style)
            base = line["metric"] - line["change"]
            low, high = (measure.scale * (base + line[end]) for end in ("low", "high"))
            axes.fill_between(share, low, high, color=style["color"], alpha=0.08)
    axes.set(
        xlabel="heads pruned (% of the kind)",
        ylabel=f"test {measure.name}{' in %' * (measure.sign > 0)}",
        title="No training after pruning; 95 % bands",
    )
    axes.legend(fontsize=8)
    axes.grid()
    return figure


@styled
def quality_through_training(table: pd.DataFrame, *, measure: Measure) -> Figure:
    """Draw the metric relative to that of all heads, or the loss, against the share of heads pruned: a line per epoch."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    epochs = list(dict.fromkeys(table["epoch"]))
    is_loss = measure.sign < 0
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(epochs)))
    for index, (colour, epoch) in enumerate(zip(colours, epochs, strict=True)):
        line = table[table["epoch"] == epoch]
        share = 100 * line["pruned"] / line["left"].max()
        label = f"epoch {epoch:g} ({measure.text(line['metric'].iloc[0])} with all)"
        values = line["metric"] if is_loss else 100 * line["relative"]
        axes.plot(share, values, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4, label=label)
    relative = "" if is_loss else ", % of the same epoch's with all heads"
    axes.set(xlabel="heads pruned (%)", ylabel=f"test {measure.name}{relative}", title="Pruned by HIS")
    axes.legend(fontsize=8)
    axes.grid()
    return figure


@styled
def attention_map(weights: Any, queries: Sequence[str], keys: Sequence[str], title: str) -> Figure:
    """Draw one head's attention in one sentence.

    Args:
        weights: ``[query, key]``.
    """
    side = 1.6 + 0.22 * max(len(keys), len(queries))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.asarray(weights), cmap=MAP, vmin=0, vmax=1)
    axes.set_xticks(range(len(keys)), keys, rotation=90)
    axes.set_yticks(range(len(queries)), queries)
    axes.set(title=title, xlabel="attended to", ylabel="attending")
    return figure
