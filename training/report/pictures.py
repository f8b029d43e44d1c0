"""Which pictures a directory gives, each with its caption and a text in its place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from scipy import stats

from gates.attention.sites import KINDS
from gates.roles.roles import RULES
from training.plotting import COLOURS, INK, MAP, agreement_matrix, styled
from training.report import captions, figures
from training.report import figures as quality
from training.report import figures as truth
from training.report.contents import Course, ReportData, Values
from training.report.figures import label_heads, label_layers
from training.report.reading import NONE, read_contents, role_counts, roles_of_gates
from training.stats.numbers import counted, listed, slug
from training.stats.significance import cross_table, pooled_odds

# The gates of a learned method over its prune phase, as a film strip.

MOMENTS = 7
"""Of a film strip, at most."""
PANEL = 1.12
"""Inches of a picture of a film strip."""
OPEN, EXPECTED, PRICE = "open", "expected", "price"


def frames_of(course: Course) -> list[int]:
    """Indices of the steps that are shown, equally far apart, from the last one before the gates begin to move to the end."""
    moved = (course.values != course.values[0]).any(axis=1)
    first, last = max(0, int(moved.argmax()) - 1), len(course.steps) - 1
    return sorted({round(first + i * (last - first) / (MOMENTS - 1)) for i in range(MOMENTS)})


def step_label(course: Course, index: int) -> str:
    """Return what a step is called; the mask, made of the gates, has no step of its own."""
    if course.ends_in_mask and index == len(course.steps) - 1:
        return "the mask"
    return f"step {course.steps[index]}"


def price_labels(course: Course, index: int) -> list[str]:
    """The price of an open head at a step: ``price 0.012``, or one for each kind; none where it is not known."""
    return [f"{kind or 'price'} {prices[index]:.2g}" for kind, prices in course.prices.items() if np.isfinite(prices[index])]


def count_labels(course: Course, index: int) -> list[str]:
    """How many gates are open at a step and, where that is known, how many are expected to be."""
    found = [f"{course.open[index].sum():.3g} {OPEN}"]
    if course.expected is not None and np.isfinite(course.expected[index]):
        found.append(f"{course.expected[index]:.1f} {EXPECTED}")
    return found


@styled
def film_strip(course: Course, title: str) -> Figure:
    """Layer x head pictures of the gates at a few moments, the mask as the last, with the open and expected heads and the price
    under each."""
    moments = frames_of(course)
    texts = [[*count_labels(course, at), *price_labels(course, at)] for at in moments]
    lines, rows = max(map(len, texts)), len(course.sites)
    figure = Figure(figsize=(0.9 + PANEL * len(moments), 0.95 + 0.15 * lines + 0.115 * max(5, rows)), layout="constrained")
    panels = figure.subplots(1, len(moments), squeeze=False)[0]
    for axes, at, text in zip(panels, moments, texts, strict=True):
        image = axes.imshow(
            Values(course.sites, course.values[at]).grid(), cmap=MAP, vmin=0, vmax=1, aspect="auto", interpolation="none"
        )
        label_layers(axes, course.sites)
        label_heads(axes, course.sites)
        axes.set_title(step_label(course, at), fontsize=8)
        axes.set_xlabel("\n".join(text), fontsize=7.5)
        axes.set_ylabel("")
        if at != moments[0]:
            axes.tick_params(axis="y", labelleft=False)
    figure.colorbar(image, ax=list(panels), label="gate", aspect=12, pad=0.01).ax.tick_params(labelsize=7)
    figure.suptitle(f"{title} (layers down, heads across)", fontsize=9)
    return figure


# What a picture of a report is.

SECTIONS = ("truth", "quality", "heads", "roles", "training", "agreement", "scores")


@dataclass(frozen=True)
class Picture:
    """A picture of a report.

    Args:
        name: of its files.
        section: one of :data:`SECTIONS`.
        figure: the picture.
        caption: what it shows, with its result.
        alt: what it looks like, for who does not see it.
        shown: whether it is open from the start; others are one click away.
        wide: whether it has several panels side by side and scrolls on a narrow screen.
    """

    name: str
    section: str
    figure: Figure
    caption: str
    alt: str
    shown: bool = True
    wide: bool = False


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
PANELS = 4


@styled
def role_map(table: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Layer x head in the colours of all roles of each head, side by side; white heads have none.

    Args:
        table: a row for each head, see :func:`training.analysis.roles.role_table`.
        names: of the roles that were measured.
    """
    kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
    height = table.groupby("kind")["site"].nunique().max()
    figure = Figure(figsize=(1.4 + 4.2 * len(kinds), 1.8 + 0.35 * height), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        own = table[table["kind"] == kind]
        sites = list(dict.fromkeys(own["site"]))
        for _, row in own.iterrows():
            held = [name for name in names if row[f"{name}_has"]]
            for part, name in enumerate(held or [""]):
                width = 0.92 / max(1, len(held))
                corner = (row["head"] - 0.46 + part * width, sites.index(row["site"]) - 0.44)
                axes.add_patch(
                    Rectangle(corner, width, 0.88, facecolor=COLOUR_OF.get(name, BLANK), edgecolor=INK, linewidth=0.2)
                )
        axes.set(title=kind, xlabel="head", ylabel="layer", xlim=(-0.6, own["head"].max() + 0.6), ylim=(len(sites) - 0.4, -0.6))
        axes.set_yticks(range(len(sites)), [site.rpartition(".")[2] for site in sites])
        axes.set_xticks(range(int(own["head"].max()) + 1))
    patches = [Patch(facecolor=COLOUR_OF[name], edgecolor=INK, linewidth=0.2, label=name) for name in names]
    patches.append(Patch(facecolor=BLANK, edgecolor=INK, linewidth=0.2, label="none"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5)
    figure.suptitle("what each head does; greys are background")
    return figure


@styled
def survivors(table: pd.DataFrame, counts: pd.DataFrame) -> Figure:
    """Heads of every role that methods keep, a panel for each of the first methods and a bar for each budget, as in Voita et
    al.'s figure 8; the leftmost bar is the dense model. A head with several roles counts in each.

    Args:
        table: of roles, a row for each head.
        counts: kept heads by method, budget and role.
    """
    methods = list(dict.fromkeys(counts["method"]))
    shown = [name for name in ("learned", "his", "random") if name in methods]
    shown += [name for name in methods if name not in shown][: PANELS - len(shown)]
    names = [name for name in [*COLOUR_OF, "none"] if (counts["role"] == name).any()]
    figure = Figure(figsize=(1.6 + 2.6 * len(shown), 3.8), layout="constrained")
    for axes, method in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        own = counts[counts["method"] == method]
        budgets = [len(table), *sorted(own["budget"].unique(), reverse=True)]
        bottom = np.zeros(len(budgets))
        for name in names:
            of_role = own[own["role"] == name].set_index("budget")
            heights = [float(of_role["heads"].iloc[0]), *(float(of_role.loc[budget, "kept"]) for budget in budgets[1:])]
            colour = COLOUR_OF.get(name, BLANK)
            axes.bar(range(len(budgets)), heights, bottom=bottom, color=colour, edgecolor=INK, linewidth=0.2, label=name)
            bottom += heights
        axes.set(title=method, xlabel="heads kept")
        axes.set_xticks(range(len(budgets)), [f"{budget}" for budget in budgets])
    figure.axes[0].set_ylabel("heads with the role (mean over seeds)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


# What a report says of roles: which heads have them, and which of them survive.


def pictures_of_roles(contents: ReportData) -> list[Picture]:
    """The map of all heads with their roles first, then the roles of the heads that methods keep.

    Raises:
        GateError: if the roles are those of another model.
    """
    table = contents.roles
    if table is None:
        return []
    shown = [rule.name for rule in RULES if _measured(contents, rule.name)]
    alt = f"Map of {len(table)} heads, layers (rows) by heads (columns), in a colour for each role; several divide a head."
    found = [Picture("roles", "roles", role_map(table, shown), _map_caption(contents, shown), alt, wide=True)]
    if contents.masks:
        found.append(_survivors(contents))
    return found


def _measured(contents: ReportData, role: str) -> bool:
    table = contents.roles
    assert table is not None
    return bool(table[f"{role}_has"].any() or (f"{role}_strength" in table and table[f"{role}_strength"].notna().any()))


def _map_caption(contents: ReportData, shown: list[str]) -> str:
    table = contents.roles
    assert table is not None
    total, special = len(table), int(table["specialised"].sum())
    low, high = stats.binomtest(special, total).proportion_ci(method="exact")
    roles = [f"{int(table[f'{name}_has'].sum())} {name}" for name in shown]
    several = int((table[[f"{name}_has" for name in shown]].sum(axis=1) > 1).sum()) if shown else 0
    none = int((table["roles"] == NONE).sum())
    return (
        f"What each head does: {special} of {total} heads ({special / total:.0%}, 95 % interval {low:.0%} to {high:.0%}) are "
        f"specialised, {none} have no role at all and {several} have more than one, side by side in their square. "
        f"{listed(roles).capitalize() if roles else 'No role was measured'}."
    )


def _survivors(contents: ReportData) -> Picture:
    """Of the first methods the heads of every role that are kept at each budget."""
    table = contents.roles
    assert table is not None
    sites = next(iter(contents.masks.values()))[0]
    of_gates = roles_of_gates(table, [(site.label, site.gates) for site in sites], f"the masks in {str(contents.path)!r}")
    masks = {key: dict(enumerate(own)) for key, (_, own) in contents.masks.items()}
    alt = f"Bars of the {contents.unit}s that methods keep at each budget, in a colour for each role; leftmost the dense model."
    figure = survivors(of_gates, role_counts(of_gates, masks))
    special = of_gates["specialised"].to_numpy(dtype=bool)
    return Picture("roles_survival", "roles", figure, _survival_caption(contents, special), alt, wide=True)


def _survival_caption(contents: ReportData, special: np.ndarray) -> str:
    """At the middle budget the specialised and the other heads that each of the first methods keeps, with odds ratios."""
    methods = [method for method, budget in contents.masks if budget == contents.focus]
    parts = []
    for method in [name for name in ("learned", "his", "random") if name in methods] or methods[:3]:
        masks = contents.masks[method, contents.focus or 0][1]
        kept = [(masks > 0)[:, group].mean() if group.any() else np.nan for group in (special, ~special)]
        odds = pooled_odds([cross_table(mask, special) for mask in masks])
        if not np.isfinite(kept).all():
            continue
        sure = f", 95 % interval {odds.low:.2f} to {odds.high:.2f}" if np.isfinite(odds.low) else ""
        ratio = f" (odds ratio {odds.ratio:.2f}{sure})" if np.isfinite(odds.ratio) else ""
        parts.append(f"{method} keeps {kept[0]:.0%} of the specialised {contents.unit}s and {kept[1]:.0%} of the others{ratio}")
    caption = f"Roles of the {contents.unit}s that are kept, means over seeds; one with several roles counts in each."
    if not parts or contents.focus is None:
        return caption
    seeds = max(len(masks) for (_, budget), (_, masks) in contents.masks.items() if budget == contents.focus)
    return f"{caption} At {contents.label(contents.focus)}, {counted(seeds, 'seed')}: {'; '.join(parts)}."


def figures_for(directory: str | os.PathLike[str]) -> dict[str, Figure]:
    """All pictures of a directory that ``training compare`` or ``training.fit`` wrote, by name.

    Raises:
        GateError: if it is neither.
    """
    return {picture.name: picture.figure for picture in pictures_of(read_contents(Path(directory)))}


def pictures_of(contents: ReportData) -> list[Picture]:
    """The pictures that the contents suffice for, in the order of a report."""
    found = [*_truth(contents), *_quality(contents), *_heads(contents), *pictures_of_roles(contents)]
    return [*found, *_training(contents), *_agreement(contents), *_scores(contents)]


def _truth(contents: ReportData) -> list[Picture]:
    if contents.truth is None:
        return []
    alt = f"Table of methods by programs with a tick where a method found the necessary heads. {truth.caption(contents.truth)}"
    return [Picture("truth", "truth", truth.ticks(contents.truth), truth.caption(contents.truth), alt, wide=True)]


def _quality(contents: ReportData) -> list[Picture]:
    found = []
    methods = listed(contents.methods)
    if len(contents.budgets) > 1:
        for stage in contents.stages:
            alt = (
                f"Line chart of test {contents.metric} against {contents.unit}s kept "
                f"({', '.join(map(str, contents.budgets))}), {stage}: a line each for {methods}, with a band of its seeds, and "
                "a dotted one for the dense model."
            )
            figure = quality.quality_against_heads(contents, stage)
            found.append(
                Picture(f"quality_{slug(stage)}", "quality", figure, captions.quality(contents, stage), alt, wide=True)
            )
    elif contents.budgets and len(contents.summary):
        alt = (
            f"Dot chart of test {contents.metric} by method ({methods}), one marker per stage; vertical lines: the dense model."
        )
        caption = " ".join(captions.headline(contents))
        found.append(Picture("quality", "quality", quality.quality_of_methods(contents), caption, alt))
    if contents.curve is not None and f"select_{contents.metric}" in contents.curve:
        alt = f"Line chart of {contents.metric} on the selection split against heads kept, mask only, a line per method."
        found.append(Picture("curve", "quality", quality.curve_of_run(contents), captions.curve(contents), alt))
    return found


def _heads(contents: ReportData) -> list[Picture]:
    """The masks of all methods side by side, at the middle budget first; where heads stay; gates, HIS and entropy."""
    masks = [picture for budget in contents.budgets or [0] for picture in _masks(contents, budget)]
    return sorted(masks, key=lambda picture: not picture.shown) + _kept(contents) + _prices(contents) + _values(contents)


def _masks(contents: ReportData, budget: int) -> list[Picture]:
    at_budget = {method: contents.kept(method, budget) for method, at in contents.masks if at == budget}
    kept = {method: values for method, values in at_budget.items() if values is not None}
    if not kept:
        return []
    seeds = max(len(masks) for (_, at), (_, masks) in contents.masks.items() if at == budget)
    caption = captions.masks(contents, budget, next(iter(kept)))
    alt = f"Maps of layers (rows) by {contents.unit}s (columns), a panel each for {listed(list(kept))}: dark where it is kept."
    figure = figures.masks_by_method(kept, unit=contents.unit, seeds=seeds)
    shown = budget == contents.focus or not contents.budgets
    return [Picture(f"masks_{budget}", "heads", figure, caption, alt, shown=shown, wide=True)]


def _values(contents: ReportData) -> list[Picture]:
    """What the masks were made of at the middle budget: the gates of learned methods, HIS and entropy."""
    his, entropy = contents.mean_score("his"), contents.mean_score("entropy")
    panels: dict[str, tuple[Values, float | None]] = {}
    for method, course in _nearest_courses(contents).items():
        panels[f"gates of {method}"] = (Values(course.sites, course.values[course.last_soft()]), 1.0)
    panels |= {"HIS": (his, None)} if his is not None else {}
    panels |= {"entropy": (entropy, 1.0)} if entropy is not None else {}
    if not panels:
        return []
    alt = f"Heat maps of layers (rows) by heads (columns), {counted(len(panels), 'panel')}: {listed(list(panels))}."
    caption = f"What masks are made of: {listed(list(panels))}.{captions.scores(his, entropy)}"
    return [Picture("values", "heads", figures.heat_maps(panels), caption, alt, wide=True)]


def _kept(contents: ReportData) -> list[Picture]:
    """Where heads stay as the budget falls, by the first learned method, or the first method if none is learned."""
    methods = list(dict.fromkeys(method for method, budget in contents.masks if budget in contents.budgets))
    method = next((name for name in methods if name.startswith("learned")), methods[0] if methods else "")
    at = {budget: contents.kept(method, budget) for budget in contents.budgets}
    kept = {budget: values for budget, values in at.items() if values is not None}
    if len(kept) < 2:
        return []
    alt = (
        f"Heat map of the {contents.unit}s that {method} keeps in each layer (rows) at each budget (columns); above it, where "
        "there are several kinds of attention, a line for the share of each."
    )
    budgets = sorted(kept, reverse=True)
    counts = np.array([[part.sum() for part in kept[budget].by_site()] for budget in budgets])
    ticks, axis = contents.axis(budgets)
    title = f"{contents.unit}s kept by {method}"
    figure = figures.kept_by_site(kept[budgets[0]].sites, counts, ticks, axis=axis, title=title)
    return [Picture(f"kept_{slug(method)}", "heads", figure, captions.kept_by_site(kept, method, contents.unit), alt)]


def _prices(contents: ReportData) -> list[Picture]:
    """Where gates stay open as their price rises, the mean over seeds, by each method that trained with prices."""
    found: list[Picture] = []
    if contents.prices is None or not contents.masks:
        return found
    sites = next(iter(contents.masks.values()))[0]
    for method, rows in contents.prices.groupby("method", sort=False):
        means = rows.drop(columns=["seed", "method"]).groupby("price", sort=True).mean()
        if not pd.api.types.is_numeric_dtype(means.index):  # one of each kind
            means = means.sort_values("open", ascending=False, kind="stable")
        counts = means[[site.label for site in sites]].to_numpy()
        if len(means) < 2:
            continue
        ticks = [f"{price:g}" if isinstance(price, float) else str(price) for price in means.index]
        title = f"open {contents.unit}s of {method} by their price"
        figure = figures.kept_by_site(sites, counts, ticks, axis=f"price of an open {contents.unit}", title=title)
        alt = (
            f"Heat map of the {contents.unit}s open in each layer (rows) at each price (columns); above it, where there are "
            "several kinds of attention, a line for the share of each."
        )
        caption = captions.prices(sites, counts, ticks, str(method))
        found.append(Picture(f"prices_{slug(str(method))}", "heads", figure, caption, alt))
    return found


def _nearest_courses(contents: ReportData) -> dict[str, Course]:
    """Of each learned method the gates over training at the budget nearest to the middle one."""
    nearest: dict[str, tuple[int, Course]] = {}
    for (method, budget), course in contents.courses.items():
        away = abs(budget - (contents.focus or 0))
        if method not in nearest or away < nearest[method][0]:
            nearest[method] = (away, course)
    return {method: course for method, (_, course) in nearest.items()}


def _training(contents: ReportData) -> list[Picture]:
    nearest = _nearest_courses(contents)
    shown = {id(course) for course in nearest.values()}
    found = []
    for (method, budget), course in contents.courses.items():
        alt = (
            "Above, open heads against the optimiser step; below, a heat map of the share of open heads in each of "
            f"{len(course.sites)} layers."
        )
        figure = figures.open_heads(course, f"{method}, {contents.label(budget)}")
        caption = captions.training(contents, course, method, budget)
        name = f"open_heads_{slug(method)}_{budget}"
        found.append(Picture(name, "training", figure, caption, alt, shown=id(course) in shown))
        if id(course) in shown and len(course.steps) > 1:
            title = f"gates of {method}, {contents.label(budget)}"
            alt = "A row of heat maps of the gates, layers by heads, at a few steps, with the open heads under each."
            strip, caption = film_strip(course, title), captions.gates(contents, course, method, budget)
            found.append(Picture(f"film_{slug(method)}_{budget}", "training", strip, caption, alt, wide=True))
    return sorted(found, key=lambda picture: not picture.shown)


def _agreement(contents: ReportData) -> list[Picture]:
    rows, found = contents.agreement, []
    if rows is None or not len(rows):
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
        caption = captions.agreement(contents, at_budget, budget)
        alt = f"Matrix of the Jaccard index between the masks of {listed(names)}, with the numbers in its cells."
        focus = budget == contents.focus or len(contents.budgets) < 2
        found.append(Picture(f"agreement_{budget}", "agreement", figure, caption, alt, shown=focus, wide=len(names) > 5))
    return sorted(found, key=lambda picture: not picture.shown)


def _scores(contents: ReportData) -> list[Picture]:
    his, entropy = contents.mean_score("his"), contents.mean_score("entropy")
    if his is None or entropy is None:
        return []
    at_focus = [method for method, budget in contents.masks if budget == contents.focus]
    method = next((name for name in at_focus if name.startswith("learned")), at_focus[0] if at_focus else "")
    kept = contents.kept(method, contents.focus) if method and contents.focus else None
    if kept is not None and len(kept.values) != len(his.values):
        kept = None
    figure = figures.his_against_entropy(contents, kept, method)
    caption = captions.his_against_entropy(his, entropy, kept, method)
    alt = f"Scatter plot of {len(his.values)} heads: HIS across, attention entropy up, colour by layer."
    alt += f" Large points are kept by {method}." if kept is not None else ""
    return [Picture("his_entropy", "scores", figure, caption, alt)]
