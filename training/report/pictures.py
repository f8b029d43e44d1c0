"""Which pictures a directory gives, each with its caption and a text in its place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from training.plotting import agreement_matrix
from training.report import captions, figures, quality, truth
from training.report.contents import Contents, Course, Values
from training.report.film import film_strip
from training.report.picture import Picture
from training.report.reading import read_contents
from training.report.role_pictures import pictures_of_roles
from training.stats.numbers import counted, listed, slug


def figures_for(directory: str | os.PathLike[str]) -> dict[str, Figure]:
    """All pictures of a directory that ``training compare`` or ``training.fit`` wrote, by name.

    Raises:
        GateError: if it is neither.
    """
    return {picture.name: picture.figure for picture in pictures_of(read_contents(Path(directory)))}


def pictures_of(contents: Contents) -> list[Picture]:
    """The pictures that the contents suffice for, in the order of a report."""
    found = [*_truth(contents), *_quality(contents), *_heads(contents), *pictures_of_roles(contents)]
    return [*found, *_training(contents), *_agreement(contents), *_scores(contents)]


def _truth(contents: Contents) -> list[Picture]:
    if contents.truth is None:
        return []
    alt = f"Table of methods by programs with a tick where a method found the necessary heads. {truth.caption(contents.truth)}"
    return [Picture("truth", "truth", truth.ticks(contents.truth), truth.caption(contents.truth), alt, wide=True)]


def _quality(contents: Contents) -> list[Picture]:
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


def _heads(contents: Contents) -> list[Picture]:
    """The masks of all methods side by side, at the middle budget first; where heads stay; gates, HIS and entropy."""
    masks = [picture for budget in contents.budgets or [0] for picture in _masks(contents, budget)]
    return sorted(masks, key=lambda picture: not picture.shown) + _kept(contents) + _prices(contents) + _values(contents)


def _masks(contents: Contents, budget: int) -> list[Picture]:
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


def _values(contents: Contents) -> list[Picture]:
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


def _kept(contents: Contents) -> list[Picture]:
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


def _prices(contents: Contents) -> list[Picture]:
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


def _nearest_courses(contents: Contents) -> dict[str, Course]:
    """Of each learned method the gates over training at the budget nearest to the middle one."""
    nearest: dict[str, tuple[int, Course]] = {}
    for (method, budget), course in contents.courses.items():
        away = abs(budget - (contents.focus or 0))
        if method not in nearest or away < nearest[method][0]:
            nearest[method] = (away, course)
    return {method: course for method, (_, course) in nearest.items()}


def focus_course(contents: Contents) -> tuple[str, int, Course] | None:
    """The first learned method with gates over training, at the budget nearest to the middle one."""
    for method, course in _nearest_courses(contents).items():
        budget = next(at for (name, at), other in contents.courses.items() if other is course and name == method)
        return method, budget, course
    return None


def _training(contents: Contents) -> list[Picture]:
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


def _agreement(contents: Contents) -> list[Picture]:
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


def _scores(contents: Contents) -> list[Picture]:
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
