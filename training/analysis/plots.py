"""The pictures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.colors
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from gates.attention.sites import KINDS, AttentionSite
from training.analysis.model import Measure
from training.plotting import COLOURS, MAP, MARKERS, styled


@styled
def effect_map(sites: tuple[AttentionSite, ...], change: Tensor, significant: Tensor, *, measure: Measure) -> Figure:
    """Layer x head: the change of the metric when each head ``[heads]`` is removed alone; blue is a gain, a star is on those
    whose change is significant ``[heads]``."""
    points = measure.scale * change.numpy()
    limit = max(float(np.abs(points).max()), 1e-3)
    ends = np.cumsum([site.heads for site in sites])[:-1]
    parts = list(zip(sites, np.split(points, ends), np.split(significant.numpy(), ends), strict=True))
    kinds = [kind for kind in KINDS if any(site.kind == kind for site in sites)]
    figure = Figure(figsize=(1.6 + 3.6 * len(kinds), 2.0 + 0.35 * max(1, len(parts) // len(kinds))), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rows = [(site.layer, part, stars) for site, part, stars in parts if site.kind == kind]
        grid = np.full((len(rows), max(len(part) for _, part, _ in rows)), np.nan)
        for row, (_, part, stars) in enumerate(rows):
            grid[row, : len(part)] = part
            for head in np.flatnonzero(stars):
                shade = "white" if abs(part[head]) > 0.5 * limit else "black"
                axes.text(head, row, "*", ha="center", va="center", color=shade)
        image = axes.imshow(grid, cmap="RdBu" if measure.sign > 0 else "RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        axes.set(title=kind, xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(rows)), [str(layer) for layer, _, _ in rows])
        axes.set_xticks(range(grid.shape[1]))
    figure.colorbar(image, ax=figure.axes, label=f"change of test {measure.name}{' (points)' * (measure.sign > 0)}")
    figure.suptitle("one head removed at a time; * significant")
    return figure


@styled
def causal_map(sites: tuple[AttentionSite, ...], roles: Tensor, agreement: Tensor, *, names: Sequence[str]) -> Figure:
    """Layer x head: the role ``[heads]`` of each head by its position in ``names``; the paler, the fewer seeds agree on it
    ``[heads]``."""
    ends = np.cumsum([site.heads for site in sites])[:-1]
    parts = list(zip(sites, np.split(roles.numpy(), ends), np.split(agreement.numpy(), ends), strict=True))
    kinds = [kind for kind in KINDS if any(site.kind == kind for site in sites)]
    colours = np.array([matplotlib.colors.to_rgb(colour) for colour in (COLOURS[0], "0.75", COLOURS[1])])
    figure = Figure(figsize=(1.2 + 3.6 * len(kinds), 2.2 + 0.35 * max(1, len(parts) // len(kinds))), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rows = [(site.layer, own, agreed) for site, own, agreed in parts if site.kind == kind]
        grid = np.ones((len(rows), max(len(own) for _, own, _ in rows), 4))
        grid[..., 3] = 0.0
        for row, (_, own, agreed) in enumerate(rows):
            grid[row, : len(own), :3] = colours[own]
            grid[row, : len(own), 3] = agreed
        axes.imshow(grid, aspect="auto")
        axes.set(title=kind, xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(rows)), [str(layer) for layer, _, _ in rows])
        axes.set_xticks(range(grid.shape[1]))
    patches = [Patch(color=colour, label=name) for name, colour in zip(names, colours, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    figure.suptitle("what each head does to the task; pale where seeds disagree")
    return figure


@styled
def relevance_scatter(table: pd.DataFrame, *, by: Mapping[str, str]) -> Figure:
    """The relevance of heads against other scores, a point per gate.

    Args:
        table: with a row per gate.
        by: titles of the other scores by their columns.
    """
    figure = Figure(figsize=(4.2 * len(by), 4.2), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(by), squeeze=False)[0], by.items(), strict=True):
        for index, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
            style: dict[str, Any] = {"color": COLOURS[index], "marker": MARKERS[index], "label": str(kind)}
            axes.scatter(rows[name], rows["relevance"], s=18, **style)
        axes.set(xlabel=title, ylabel="relevance, share of the layer")
        axes.grid()
    figure.axes[0].legend(fontsize=8)
    return figure


@styled
def quality_by_kind(table: pd.DataFrame, *, measure: Measure) -> Figure:
    """The metric against the share of heads pruned: a colour per kind, one-shot solid and iterative dashed."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (kind, of_kind) in enumerate(table.groupby("kind", sort=False)):
        for schedule, line in of_kind.groupby("schedule", sort=False):
            share = 100 * line["pruned"] / line["left"].max()
            style: dict[str, Any] = {
                "color": COLOURS[index % len(COLOURS)],
                "marker": MARKERS[index % len(MARKERS)],
                "markersize": 4,
            }
            axes.plot(
                share,
                measure.scale * line["metric"],
                "-" if schedule == "one-shot" else "--",
                label=f"{kind}, {schedule}",
                **style,
            )
            axes.fill_between(
                share,
                measure.scale * (line["metric"] - line["change"] + line["low"]),
                measure.scale * (line["metric"] - line["change"] + line["high"]),
                color=style["color"],
                alpha=0.08,
            )
    axes.set(
        xlabel="heads pruned (% of the kind)",
        ylabel=f"test {measure.name}{' x 100' * (measure.sign > 0)}",
        title="No training after pruning; 95 % bands",
    )
    axes.legend(fontsize=8)
    axes.grid()
    return figure


@styled
def domain_scatter(table: pd.DataFrame, numbers: dict[str, Any]) -> Figure:
    """HIS and ablation effects on the run's data against those on other data, a point per gate."""
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    titles = {"his": "HIS, normalised by layer", "loss_change": "change of the loss without the head"}
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for index, (kind, rows) in enumerate(table.groupby("kind", sort=False)):
            axes.scatter(rows[name], rows[f"other_{name}"], s=18, color=COLOURS[index], marker=MARKERS[index], label=str(kind))
        pearson = numbers[name]["pearson"]
        axes.set(title=title if pearson is None else f"{title} (r = {pearson:.2f})", xlabel="run's data", ylabel="other data")
        axes.grid()
    figure.axes[0].legend(fontsize=8)
    return figure


@styled
def quality_through_training(table: pd.DataFrame, *, measure: Measure) -> Figure:
    """The metric, relative to that of all heads, or the loss, against the share of heads pruned: a line per epoch from dark to
    light."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    epochs = list(dict.fromkeys(table["epoch"]))
    is_loss = measure.sign < 0
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(epochs)))
    for index, (colour, epoch) in enumerate(zip(colours, epochs, strict=True)):
        line = table[table["epoch"] == epoch]
        share = 100 * line["pruned"] / line["left"].max()
        label = f"epoch {epoch:g} ({measure.told(line['metric'].iloc[0])} with all)"
        values = line["metric"] if is_loss else 100 * line["relative"]
        axes.plot(share, values, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4, label=label)
    relative = "" if is_loss else ", % of the same epoch's with all heads"
    axes.set(xlabel="heads pruned (%)", ylabel=f"test {measure.name}{relative}", title="Pruned by HIS")
    axes.legend(fontsize=8)
    axes.grid()
    return figure


@styled
def attention_map(weights: Any, queries: Sequence[str], keys: Sequence[str], title: str) -> Figure:
    """One head's attention in one sentence.

    Args:
        weights: ``[query, key]``.
        queries, keys: tokens.
        title: of the picture.
    """
    side = 1.6 + 0.22 * max(len(keys), len(queries))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.asarray(weights), cmap=MAP, vmin=0, vmax=1)
    axes.set_xticks(range(len(keys)), keys, rotation=90)
    axes.set_yticks(range(len(queries)), queries)
    axes.set(title=title, xlabel="attended to", ylabel="attending")
    return figure
