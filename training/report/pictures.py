"""Which pictures a directory gives, each with its caption and a text in its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gates.attention.sites import KINDS
from gates.roles.roles import RULES
from training.plotting import COLOURS, INK, agreement_matrix, quality_by_budget, styled
from training.report import captions, figures
from training.report.contents import GateHistory, ReportData, Sites, Values
from training.report.reading import NONE, read_contents, role_counts, roles_of_gates
from training.stats.numbers import listed, slug

# The gates of a learned method over its prune phase, as a film strip.


def frames_of(history: GateHistory) -> list[int]:
    """Return the indices of at most seven steps, equally far apart, from the last one before the gates move to the end."""
    moved = (history.values != history.values[0]).any(axis=1)
    first, last = max(0, int(moved.argmax()) - 1), len(history.steps) - 1
    return sorted({round(first + part * (last - first) / 6) for part in range(7)})


def step_label(history: GateHistory, index: int) -> str:
    """Return the name of a step. The mask, made of the gates, has no step of its own."""
    return "the mask" if history.ends_in_mask and index == len(history.steps) - 1 else f"step {history.steps[index]}"


def counts_at(history: GateHistory, index: int) -> list[str]:
    """Say how many gates are open at a step and, where it is known, how many are expected to be and the price of one."""
    found = [f"{history.open[index].sum():.3g} open"]
    if history.expected is not None and np.isfinite(history.expected[index]):
        found.append(f"{history.expected[index]:.1f} expected")
    prices = {kind or "price": values[index] for kind, values in history.prices.items()}
    return found + [f"{name} {price:.2g}" for name, price in prices.items() if np.isfinite(price)]


@styled
def film_strip(history: GateHistory, title: str) -> Figure:
    """Draw the gates at a few moments, layer x head, the mask as the last, with the open heads and the price under each."""
    moments = frames_of(history)
    texts = [counts_at(history, at) for at in moments]
    height = 0.95 + 0.15 * max(map(len, texts)) + 0.115 * max(5, len(history.sites))
    figure = Figure(figsize=(0.9 + 1.12 * len(moments), height), layout="constrained")
    panels = figure.subplots(1, len(moments), squeeze=False)[0]
    for axes, at, text in zip(panels, moments, texts, strict=True):
        image = figures.heat_map(axes, Values(history.sites, history.values[at]))
        axes.set_title(step_label(history, at), fontsize=8)
        axes.set_xlabel("\n".join(text), fontsize=7.5)
        axes.set_ylabel("")
        if at != moments[0]:
            axes.tick_params(axis="y", labelleft=False)
    figure.colorbar(image, ax=list(panels), label="gate", aspect=12, pad=0.01).ax.tick_params(labelsize=7)
    figure.suptitle(f"{title} (layers down, heads across)", fontsize=9)
    return figure


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Args:
        section: The part of the page: truth, quality, heads, roles, training or agreement.
        caption: The description of the picture, with its result.
        shown: Whether it is open from the start.
        wide: Whether it scrolls on a narrow screen, since it has several panels side by side.
        svg: The picture as safe markup of a page.
    """

    name: str
    section: str
    figure: Figure
    caption: str
    shown: bool = True
    wide: bool = False
    svg: str = ""


# The pictures of roles: a map of all heads, and which of them methods keep.

BLANK = "#ffffff"
COLOUR_OF = {
    "positional": COLOURS[0],
    "syntactic": COLOURS[2],
    "rare": COLOURS[4],
    "coreference": COLOURS[1],
    "induction": COLOURS[3],
    "duplicate": COLOURS[7],
    "separator": "#b5b8bc",
    "first-token": "#d3d5d8",
    "broad": "#e8e9ea",
}
"""Specialised roles in colours, background in greys."""


@styled
def role_map(table: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Draw layer x head in the colours of all roles of each head, side by side; white heads have none."""
    kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
    height = table.groupby("kind")["site"].nunique().max()
    figure = Figure(figsize=(1.4 + 4.2 * len(kinds), 1.8 + 0.35 * height), layout="constrained")
    look: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.2}
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        own = table[table["kind"] == kind]
        sites = list(dict.fromkeys(own["site"]))
        for _, row in own.iterrows():
            held = [name for name in names if row[f"{name}_has"]] or [""]
            width = 0.92 / len(held)
            for part, name in enumerate(held):
                corner = (row["head"] - 0.46 + part * width, sites.index(row["site"]) - 0.44)
                axes.add_patch(Rectangle(corner, width, 0.88, facecolor=COLOUR_OF.get(name, BLANK), **look))
        axes.set(title=kind, xlabel="head", ylabel="layer", xlim=(-0.6, own["head"].max() + 0.6), ylim=(len(sites) - 0.4, -0.6))
        axes.set_yticks(range(len(sites)), [site.rpartition(".")[2] for site in sites])
        axes.set_xticks(range(int(own["head"].max()) + 1))
    patches = [Patch(facecolor=COLOUR_OF.get(name, BLANK), label=name, **look) for name in [*names, NONE]]
    figure.legend(handles=patches, loc="outside lower center", ncols=5)
    figure.suptitle("what each head does; greys are background")
    return figure


@styled
def survivors(table: pd.DataFrame, counts: pd.DataFrame) -> Figure:
    """Draw how many heads of every role methods keep, as in Voita et al.'s figure 8.

    There is a panel for each of at most four methods and a bar for each budget. The leftmost bar is the dense model. A head
    with several roles counts in each.

    Args:
        table: The roles, a row for each head.
        counts: Kept heads by method, budget and role (:func:`training.report.reading.role_counts`).
    """
    methods = list(dict.fromkeys(counts["method"]))
    shown = sorted(methods, key=lambda name: name not in ("learned", "his", "random"))[:4]
    names = [name for name in [*COLOUR_OF, NONE] if (counts["role"] == name).any()]
    figure = Figure(figsize=(1.6 + 2.6 * len(shown), 3.8), layout="constrained")
    for axes, method in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        own = counts[counts["method"] == method]
        kept = own.pivot(index="budget", columns="role", values="kept").sort_index(ascending=False)
        heights = pd.concat([own.drop_duplicates("role").set_index("role")[["heads"]].T, kept])[names]
        heights.index = pd.Index([len(table), *kept.index])
        colours = [COLOUR_OF.get(name, BLANK) for name in names]
        heights.plot.bar(ax=axes, stacked=True, color=colours, edgecolor=INK, linewidth=0.2, width=0.8, legend=False, rot=0)
        axes.set(title=method, xlabel="heads kept")
    figure.axes[0].set_ylabel("heads with the role (mean over seeds)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def pictures_of_roles(contents: ReportData) -> list[Picture]:
    """Return the map of all heads with their roles, then the roles of the heads that methods keep."""
    table = contents.roles
    if table is None:
        return []
    strengths = {rule.name: table.get(f"{rule.name}_strength", pd.Series(dtype=float)) for rule in RULES}
    shown = [name for name, strength in strengths.items() if table[f"{name}_has"].any() or strength.notna().any()]
    caption = "The roles of each head; several roles of one head divide its square."
    found = [Picture("roles", "roles", role_map(table, shown), caption, wide=True)]
    if contents.masks:
        sites = next(iter(contents.masks.values()))[0]
        where = f"the masks in {str(contents.path)!r}"
        of_gates = roles_of_gates(table, [(site.label, site.gates) for site in sites], where)
        masks = {key: dict(enumerate(own)) for key, (_, own) in contents.masks.items()}
        figure = survivors(of_gates, role_counts(of_gates, masks))
        caption = f"Roles of the {contents.unit}s that are kept, means over seeds; one with several roles counts in each."
        found.append(Picture("roles_survival", "roles", figure, caption, wide=True))
    return found


def figures_for(directory: str | os.PathLike[str]) -> dict[str, Figure]:
    """Return all pictures of a directory that ``training compare`` or ``training.fit`` wrote, by name."""
    return {picture.name: picture.figure for picture in pictures_of(read_contents(Path(directory)))}


def pictures_of(contents: ReportData) -> list[Picture]:
    """Return the pictures that the contents suffice for, in the order of a report."""
    found = [*_truth(contents), *_quality(contents), *_heads(contents), *pictures_of_roles(contents)]
    return [*found, *_training(contents), *_agreement(contents)]


def _truth(contents: ReportData) -> list[Picture]:
    if contents.truth is None:
        return []
    caption = figures.caption(contents.truth)
    return [Picture("truth", "truth", figures.ticks(contents.truth), caption, wide=True)]


def _quality(contents: ReportData) -> list[Picture]:
    metric, found = contents.metric, []
    if len(contents.budgets) > 1:
        for stage in contents.stages:
            figure, caption = figures.quality_against_heads(contents, stage), captions.best_method(contents, stage)
            found.append(Picture(f"quality_{slug(stage)}", "quality", figure, caption))
    elif contents.budgets and len(contents.summary):
        caption = " ".join(captions.best_method(contents, stage) for stage in contents.stages_by_weight)
        found.append(Picture("quality", "quality", figures.quality_of_methods(contents), caption))
    if contents.curve is not None and f"select_{metric}" in contents.curve:
        lower = contents.lower_is_better
        figure = quality_by_budget(contents.curve, contents.comparison, metric=metric, lower_is_better=lower)
        left, right = ("Left, the mask", " Right, the retrained models.") if len(figure.axes) > 1 else ("The mask", "")
        caption = f"{left} alone: {metric} on the selection split by heads kept.{right} One seed."
        found.append(Picture("curve", "quality", figure, caption, wide=True))
    return found


def _heads(contents: ReportData) -> list[Picture]:
    """Return the masks of all methods, the middle budget first; the kept heads by site; HIS and entropy."""
    masks = [picture for budget in contents.budgets or [0] for picture in _masks(contents, budget)]
    return sorted(masks, key=lambda picture: not picture.shown) + _kept(contents) + _prices(contents) + _values(contents)


def _masks(contents: ReportData, budget: int) -> list[Picture]:
    kept = contents.kept_at(budget)
    if not kept:
        return []
    seeds = max(len(masks) for (_, at), (_, masks) in contents.masks.items() if at == budget)
    figure = figures.masks_by_method(kept, unit=contents.unit, seeds=seeds)
    shown = budget == contents.focus or not contents.budgets
    caption = f"Masks of {budget} of {contents.label(len(next(iter(kept.values())).values))}{contents.of_kinds(budget)}."
    if again := [name for name in kept if (name, budget) in contents.searched_again]:
        caption += f" The masks of {listed(again)} are those of trained weights; other ones were searched on the dense model."
    return [Picture(f"masks_{budget}", "heads", figure, caption, shown=shown, wide=True)]


def _values(contents: ReportData) -> list[Picture]:
    named = {"HIS": contents.mean_score("his"), "entropy": contents.mean_score("entropy")}
    panels = {name: values for name, values in named.items() if values is not None}
    if not panels:
        return []
    figure = figures.heat_maps(panels, label="", top=None)
    caption = f"{listed(list(panels))} of every head, the mean over seeds: bright where it is high."
    return [Picture("values", "heads", figure, caption, wide=True)]


def _kept(contents: ReportData) -> list[Picture]:
    """Return where heads stay as the budget falls, by the first learned method, or by the first one if none is learned."""
    methods = [method for method, budget in contents.masks if budget in contents.budgets]
    method = min(methods, key=lambda name: not name.startswith("learned"), default="")
    kept = {at: values for at in contents.budgets if (values := contents.kept(method, at)) is not None}
    if len(kept) < 2:
        return []
    counts = np.array([[part.sum() for part in values.by_site()] for values in kept.values()])
    ticks, axis = contents.axis(list(kept))
    title = f"{contents.unit}s kept by {method}"
    return [_by_site(f"kept_{slug(method)}", next(iter(kept.values())).sites, counts, ticks, axis, title, method)]


def _prices(contents: ReportData) -> list[Picture]:
    """Return where gates stay open as their price rises, the mean over seeds, by each method that trained with prices."""
    found: list[Picture] = []
    if contents.prices is None or not contents.masks:
        return found
    sites = next(iter(contents.masks.values()))[0]
    for method, rows in contents.prices.groupby("method", sort=False):
        means = rows.drop(columns=["seed", "method"]).groupby("price", sort=True).mean()
        if not pd.api.types.is_numeric_dtype(means.index):  # one of each kind
            means = means.sort_values("open", ascending=False, kind="stable")
        if len(means) < 2:
            continue
        ticks = [f"{price:g}" if isinstance(price, float) else str(price) for price in means.index]
        title, axis = f"open {contents.unit}s of {method} by their price", f"price of an open {contents.unit}"
        counts = means[[site.label for site in sites]].to_numpy()
        found.append(_by_site(f"prices_{slug(str(method))}", sites, counts, ticks, axis, title, str(method)))
    return found


def _by_site(name: str, sites: Sites, counts: np.ndarray, ticks: list[str], axis: str, title: str, method: str) -> Picture:
    figure = figures.kept_by_site(sites, counts, ticks, axis=axis, title=title)
    return Picture(name, "heads", figure, f"By {axis}: the gates of each site that {method} keeps.")


def _training(contents: ReportData) -> list[Picture]:
    """Return open heads over training, and at the budget nearest to the middle one of each method its gates too."""
    nearest: dict[str, int] = {}
    for method, budget in contents.histories:
        nearest[method] = min(nearest.get(method, budget), budget, key=lambda at: abs(at - (contents.focus or 0)))
    together: dict[tuple[int, bytes], list[str]] = {}  # a method has the same gates with a refit as without
    for (method, budget), history in contents.histories.items():
        together.setdefault((budget, history.values.tobytes()), []).append(method)
    found = []
    for (budget, _), methods in together.items():
        method, history = methods[0], contents.histories[methods[0], budget]
        shown, title = budget == nearest[method], f"{listed(methods)}, {contents.label(budget)}"
        name, mean = f"{slug(method)}_{budget}", f", the mean of {history.seeds} seeds" if history.seeds > 1 else ""
        mask = ", with the mask as the last step" if history.ends_in_mask else ""
        caption = f"Open {contents.unit}s of {title} over training{mean}{mask}."
        found.append(Picture(f"open_heads_{name}", "training", figures.open_heads(history, title), caption, shown=shown))
        if shown and len(history.steps) > 1:
            strip, caption = film_strip(history, f"gates of {title}"), f"The gates of {title}, at a few steps{mean}."
            found.append(Picture(f"film_{name}", "training", strip, caption, wide=True))
    return sorted(found, key=lambda picture: not picture.shown)


def _agreement(contents: ReportData) -> list[Picture]:
    rows, found = contents.agreement, []
    if rows is None:
        return []
    for budget in sorted((int(budget) for budget in rows["budget"].unique()), reverse=True):
        at_budget = rows[rows["budget"] == budget]
        present = set(at_budget["method"]) | set(at_budget["other"])
        names = [name for name in contents.methods if name in present]
        names += sorted(present - set(names))
        table = at_budget.pivot_table(index="method", columns="other", values="jaccard").reindex(index=names, columns=names)
        grid = table.combine_first(table.T).reindex(index=names, columns=names).to_numpy(dtype=float)
        chance = pd.to_numeric(at_budget["chance_jaccard"]).mean()
        between = "diagonal: between seeds; " if (at_budget["method"] == at_budget["other"]).any() else ""
        title = f"Jaccard index of masks of {contents.label(budget)}\n({between}by chance: {chance:.2f})"
        figure = agreement_matrix(names, grid, title=title, chance=float(chance))
        caption = f"Agreement of masks of {contents.label(budget)}, and of random masks of their size."
        focus = budget == contents.focus or len(contents.budgets) < 2
        found.append(Picture(f"agreement_{budget}", "agreement", figure, caption, shown=focus, wide=len(names) > 5))
    return sorted(found, key=lambda picture: not picture.shown)
