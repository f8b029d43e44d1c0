"""The pictures of a run, drawn with matplotlib, and the style of all pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator, NullFormatter
from PIL import Image
from torch import Tensor

from gates.attention.sites import KINDS, AttentionSite
from gates.scores.ranking import jaccard
from training.config.comparison import POST_HOC, is_retrained
from training.stats.numbers import shown, unit
from training.stats.tables import overlap

INK = "#1c1f23"
"""Colour of text, axes and the dense model; a page may replace it by the colour of its own text."""
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#7767E6", "#73481D", "#990086", "#7D838C",
)  # fmt: skip
"""Okabe and Ito's colours for colour-blind readers, with an olive in place of their yellow, and four more.

All can be seen on white and on near black."""
OF_METHODS = {"learned": COLOURS[0], "his": COLOURS[1], "random": COLOURS[-1]}
"""Colours of the methods that most pictures hold; no other method has them while others are left."""
MARKERS = "osD^vP*X<>"
DASHES: tuple[Any, ...] = ("-", "--", (0, (1, 1.2)), "-.", (0, (5, 1, 1, 1, 1, 1)))
LETTER = 0.07
"""Inches of a letter of a legend, about."""
MAP = "cividis"
"""The colours of heat maps: perceptually uniform, and the same for colour-blind readers."""
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.8,  # shows the dashes around the marker
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
    """Draw in the project's style, and to the end: ticks take the style that is in force when they are drawn."""

    @wraps(draw)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            figure = draw(*args, **kwargs)
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # laid out once, not again for every file
        return figure

    return wrapped


def line_style(index: int) -> dict[str, Any]:
    """Return colour, marker and dashes of a line. Their periods differ, so the first 70 lines differ."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def method_styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return one style per method. Colours and markers differ as long as there are any left."""
    free = sorted(COLOURS, key=lambda colour: colour in OF_METHODS.values())
    others = [method for method in methods if method not in OF_METHODS]
    colours = OF_METHODS | {method: free[index % len(free)] for index, method in enumerate(others)}
    return {method: line_style(index) | {"color": colours[method]} for index, method in enumerate(methods)}


def legend_below(figure: Figure, axes: Axes, order: Sequence[str] = ()) -> Legend:
    """Make the picture higher and write the names of the lines below it, in as many columns as fit."""
    handles, labels = _ordered(axes, order)
    columns = max(1, int(figure.get_figwidth() / (0.65 + LETTER * max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(labels) // columns))
    return figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _ordered(axes: Axes, order: Sequence[str]) -> tuple[list[Any], list[str]]:
    handles, labels = axes.get_legend_handles_labels()
    places = sorted(range(len(labels)), key=lambda at: order.index(labels[at]) if labels[at] in order else len(order))
    return [handles[at] for at in places], [labels[at] for at in places]


def spread_widely_(axes: Axes, values: Iterable[float], *, axis: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic if all values are above 0 and the largest is over ten times the least.

    Perplexities of models without training spread so widely.
    """
    finite = [float(value) for value in values if np.isfinite(value)]
    if not finite or min(finite) <= 0 or max(finite) < 10 * min(finite):
        return
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": (min(finite) / 1.3, max(finite) * 1.3)})
    along = axes.yaxis if axis == "y" else axes.xaxis
    along.set_major_formatter("{x:g}")
    along.set_minor_formatter(NullFormatter())


def draw_by_kind(
    sites: Sequence[AttentionSite], draw: Callable[..., None], *values: np.ndarray, title: str, width: float = 1.2
) -> Figure:
    """Draw layer x head pictures, one panel per kind of attention.

    Args:
        draw: A function that draws one panel from its axes and a grid ``[layers, heads]`` of each value. NaN means no head.
        values: The numbers per head, ``[heads]`` each.
        width: The inches left and right of the panels.
    """
    ends = np.cumsum([site.heads for site in sites])[:-1]
    kinds = [kind for kind in KINDS if any(site.kind == kind for site in sites)]
    height = 1.8 + 0.35 * max(1, len(sites) // len(kinds))
    figure = Figure(figsize=(width + 3.6 * len(kinds), height), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        own = [place for place, site in enumerate(sites) if site.kind == kind]
        grids = [np.full((len(own), max(sites[place].heads for place in own)), np.nan) for _ in values]
        for grid, of_heads in zip(grids, values, strict=True):
            parts = np.split(of_heads, ends)
            for row, place in enumerate(own):
                grid[row, : sites[place].heads] = parts[place]
        draw(axes, *grids)
        axes.set(title=kind, xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(own)), [str(sites[place].layer) for place in own])
        axes.set_xticks(range(grids[0].shape[1]))
    figure.suptitle(title)
    return figure


@styled
def gate_heat_map(sites: Sequence[AttentionSite], values: Tensor, *, title: str) -> Figure:
    """Draw a value per head in [0, 1], layer x head, one panel per kind of attention."""

    def draw(axes: Axes, grid: np.ndarray) -> None:
        axes.imshow(grid, cmap=MAP, vmin=0, vmax=1, aspect="auto")

    figure = draw_by_kind(sites, draw, values.numpy(), title=title)
    figure.colorbar(figure.axes[0].images[0], ax=figure.axes, label="gate", ticks=(0, 0.5, 1))
    return figure


@styled
def quality_by_budget(curve: pd.DataFrame, comparison: pd.DataFrame, *, metric: str, lower_is_better: bool = False) -> Figure:
    """Draw quality on the selection split: on the left the mask alone at every budget, on the right the retrained models.

    Each panel has the dense model of its own stage as a dotted line.

    Args:
        curve: The columns method, heads, select_METRIC (mask alone).
        comparison: The columns method, stage, heads, select_METRIC, at the budget of the run.
        lower_is_better: Whether its lowest value is the best, as of a perplexity.
    """
    column = f"select_{metric}"
    curve, comparison = (table.assign(value=shown(metric, table[column])) for table in (curve, comparison))
    styles = method_styles(list(dict.fromkeys(map(str, curve["method"]))))
    post_hoc = comparison[comparison["stage"] == POST_HOC]
    retrained = comparison[comparison["stage"].map(is_retrained)]
    lines = pd.concat([curve, post_hoc]).drop_duplicates(["method", "heads"]).sort_values("heads")
    points = retrained[retrained["method"] != "dense"]
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    left, *right = figure.subplots(
        1, 1 + bool(len(points)), sharey=True, squeeze=False, width_ratios=(3, 1)[: 1 + bool(len(points))]
    )[0]
    for method, style in styles.items():
        line = lines[lines["method"] == method]
        left.plot(line["heads"], line["value"], **style, markersize=4, linewidth=1.2, label=method)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes, table in zip((left, *right), (post_hoc, retrained), strict=False):
        for value in table.loc[table["method"] == "dense", "value"]:
            axes.axhline(value, color=INK, linestyle=":", label="dense")
        axes.grid(visible=True, axis="y")
    left.set(xlabel="heads kept", ylabel=f"{metric}{unit(metric)}, selection split", title="mask alone")
    for axes in right:
        for place, (method, value) in enumerate(zip(points["method"], points["value"], strict=True)):
            style = styles.get(method.split("+")[0], {"color": INK, "marker": "o"})  # of the ranking without its modifiers
            axes.scatter([place], [value], color=style["color"], marker=style["marker"], s=36)
        axes.set(title="retrained", xlabel=f"{int(points['heads'].iloc[0])} heads", xlim=(-1, len(points)))
        axes.set_xticks(range(len(points)), points["method"], rotation=90, fontsize="small")
    if lower_is_better:
        spread_widely_(left, [*lines["value"], *points["value"]])
    fewest = curve[curve["heads"] == curve["heads"].min()].sort_values("value", ascending=False, kind="stable")
    legend_below(figure, left, ["dense", *fewest["method"]])
    return figure


@styled
def heads_within_loss(search: Mapping[str, Any], metric: str, gate: str) -> Figure:
    """Draw the loss on the selection split against the heads that are kept, with 95 % intervals, and the budget found.

    Args:
        gate: The unit of budgets: a head, or a group of heads.
    """
    points = pd.DataFrame(search["points"])
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    ends = [points["loss"] - points["low"], points["high"] - points["loss"]]
    style: dict[str, Any] = {"color": INK, "marker": "o", "markersize": 4, "linewidth": 1.2, "capsize": 2.5}
    axes.errorbar(points["heads"], points["loss"], yerr=ends, label=search["method"], **style)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.axhline(search["max_loss"], color=INK, linestyle=":", label=f"max_loss {search['max_loss']:g}")
    axes.axvline(search["budget"], color=INK, linestyle="--", label=f"budget {search['budget']}")
    axes.set(
        xlabel=f"{gate}s kept",
        ylabel=f"loss of {metric} ({search['measure']})",
        title="Selection split, against the dense model",
    )
    axes.grid(visible=True)
    axes.legend()
    return figure


@styled
def mask_agreement(masks: dict[str, Tensor], kinds: Tensor | None = None) -> Figure:
    """Draw the Jaccard index of every pair of masks, and the expected one of two random masks of this size.

    Args:
        kinds: The kind of each gate as a number ``[gates]``, for a budget per kind: random masks keep as many of each then.
    """
    names = list(masks)
    grid = np.array([[jaccard(masks[row], masks[column]) for column in names] for row in names])
    any_mask = next(iter(masks.values())).cpu().int().numpy()
    _, chance = overlap(any_mask, any_mask, None if kinds is None else kinds.cpu().numpy())
    title = f"Heads in both masks over heads in either\n(by chance: {chance:.2f})"
    return agreement_matrix(names, grid, title=title, chance=chance)


@styled
def agreement_matrix(names: list[str], grid: np.ndarray, *, title: str, chance: float | None = None) -> Figure:
    """Draw the agreement of methods in [0, 1] with its numbers, every pair once.

    Args:
        grid: ``[names, names]``; its lower triangle is drawn. NaN for unknown pairs.
        chance: The agreement of random masks, drawn as a line on the scale.
    """
    size = max(2.6, 1.0 + 0.42 * len(names))
    figure = Figure(figsize=(size + 1.6, size), layout="compressed")
    axes = figure.subplots()
    lower = np.where(np.tri(len(names), dtype=bool), grid, np.nan)
    image = axes.imshow(lower, cmap=MAP, vmin=0, vmax=1, interpolation="none")
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for row, column in zip(*np.nonzero(~np.isnan(lower)), strict=True):
        shade = "#ffffff" if lower[row, column] < 0.5 else "#000000"
        axes.text(column, row, f"{lower[row, column]:.2f}", ha="center", va="center", color=shade, fontsize=8)
    axes.set_title(title, fontsize=9)
    scale = figure.colorbar(image, ax=axes, shrink=0.8)
    if chance is not None:
        scale.ax.axhline(chance, color="#ffffff" if chance < 0.5 else "#000000", linewidth=1.5)
        scale.ax.annotate(
            "chance", (0, chance), xytext=(-3, 0), textcoords="offset points", ha="right", va="center", fontsize=7
        )
    return figure


def figure_image(figure: Figure) -> Image.Image:
    """Return a figure as a picture in memory, for loggers."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    buffer.seek(0)
    return Image.open(buffer)
