"""Captions that state the result of a picture or table, made from its numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from training.report.contents import Contents, Course, Values, is_dense
from training.report.numbers import counted, duration, listed, p_value, quantity

STAGE_WORDS = {
    "post hoc": "With the mask alone (post hoc)",
    "settled": "Trained on with the mask (settled)",
    "from scratch": "Trained from scratch with the mask",
}


def quality(contents: Contents, stage: str) -> str:
    """Which method is best at each budget of a stage, how many others its interval meets, and what the dense model has."""
    metric = contents.metric
    rows = contents.summary[contents.summary["stage"] == stage]
    dense, rows = rows[rows["method"] == "dense"], rows[~is_dense(rows)].dropna(subset=["mean"])
    parts, lowest = [], ""
    for budget in contents.budgets:
        at_budget = rows[rows["budget"] == budget].sort_values("mean", ascending=False, kind="stable")
        if len(at_budget):
            parts.append(f"at {counted(budget, 'head')} {_best(metric, at_budget)}")
        if len(at_budget) > 1:
            last = at_budget.iloc[-1]
            below = last["mean"] < at_budget["mean"].iloc[0]
            lowest = (
                ""
                if not below
                else f" Lowest at {counted(budget, 'head')}: {last['method']}, {quantity(metric, last['mean'])}."
            )
    if not parts:
        return f"{STAGE_WORDS.get(stage, stage)} there is only the dense model."
    text = f"{STAGE_WORDS.get(stage, stage)}, highest test {metric}: {'; '.join(parts)}.{lowest}"
    if has_intervals(rows) and len(set(rows["method"])) > 1:
        text += " Level are those whose 95 % interval meets that of the highest."
    if len(dense):
        text += f" Dense: {quantity(metric, dense['mean'].iloc[0])}."
    return text + _of_seeds(rows)


def _best(metric: str, rows: pd.DataFrame) -> str:
    """The first of rows in falling order, those equal to it, and with how many of the others its interval overlaps."""
    top = rows[rows["mean"] == rows["mean"].iloc[0]]
    text = f"{listed(list(top['method']))}, {quantity(metric, top['mean'].iloc[0])}"
    rivals = rows[len(top) :]
    if not has_intervals(rows) or not len(rivals):
        return text
    level = int(((rivals["high"] >= top["low"].iloc[0]) & (rivals["low"] <= top["high"].iloc[0])).sum())
    return f"{text} ({level} of {counted(len(rivals), 'rival')} level)"


def results(contents: Contents) -> str:
    """The best trained result, beside the dense model's."""
    rows = contents.summary.dropna(subset=["mean"])
    trained = rows[~is_dense(rows) & (rows["stage"] != "post hoc")]
    rows = trained if len(trained) else rows[~is_dense(rows)]
    if not len(rows):
        return f"Test {contents.metric} of the dense model."
    best = _highest(rows, "mean")
    return (
        f"Test {contents.metric} per stage, method and heads kept. Highest: {best['method']} at "
        f"{counted(int(best['budget']), 'head')}, {best['stage']}, with {quantity(contents.metric, best['mean'])}. "
        "Column titles sort."
    )


def _highest(rows: pd.DataFrame, column: str) -> pd.Series:
    """The row with the largest number, the first of equals."""
    return rows.sort_values(column, ascending=False, kind="stable").iloc[0]


def has_intervals(rows: pd.DataFrame) -> bool:
    return {"low", "high"} <= set(rows.columns) and bool(rows[["low", "high"]].notna().all(axis=None))


def _of_seeds(rows: pd.DataFrame) -> str:
    seeds = int(rows["seeds"].max()) if "seeds" in rows and len(rows) else 0
    if seeds == 1:
        return " One seed, so no interval: small differences decide nothing."
    return f" Means of {counted(seeds, 'seed')}." if seeds else ""


def curve(contents: Contents) -> str:
    """The best ranking at each budget of a run's curve."""
    assert contents.curve is not None
    metric = contents.metric
    parts = []
    for heads, rows in contents.curve.sort_values("heads", ascending=False).groupby("heads", sort=False):
        best = rows[rows[f"select_{metric}"] == rows[f"select_{metric}"].max()]
        named = f"{listed(list(best['method']))} with {quantity(metric, float(best[f'select_{metric}'].iloc[0]))}"
        parts.append(f"at {counted(int(str(heads)), 'head')} {named}")
    return f"With the mask alone, the best {metric} on the selection split: {'; '.join(parts)}. One seed."


def masks(contents: Contents, budget: int, method: str) -> str:
    """Where one method's heads are, and which heads all methods agree on."""
    kept = contents.kept(method, budget)
    assert kept is not None
    counts = [float(part.sum()) for part in kept.by_site()]
    most, fewest = int(np.argmax(counts)), int(np.argmin(counts))
    labels = [site.label for site in kept.sites]
    text = f"At {budget} of {len(kept.values)} heads, {method} keeps "
    if counts[most] == counts[fewest]:
        text += f"{counts[most]:.3g} in every layer."
    else:
        text += (
            f"most in {labels[most]} ({counts[most]:.3g} of {kept.sites[most].gates}) and fewest in {labels[fewest]} "
            f"({counts[fewest]:.3g} of {kept.sites[fewest].gates})."
        )
    shares = [
        found.values for name, at in contents.masks if at == budget and (found := contents.kept(name, budget)) is not None
    ]
    if len(shares) > 1 and len({len(share) for share in shares}) == 1:
        always, never = int((np.min(shares, axis=0) == 1).sum()), int((np.max(shares, axis=0) == 0).sum())
        text += (
            f" All {len(shares)} methods agree in every seed on {counted(always, 'head')} to keep and {counted(never, 'head')} "
            "to give up."
        )
    seeds = max(len(masks) for _, masks in contents.masks.values())
    return text + (f" Masks show the share of {seeds} seeds that keep a head." if seeds > 1 else "")


def kept_by_site(kept: dict[int, Values], method: str) -> str:
    """How much of each kind, or of which layers, is left at the smallest budget."""
    budget = min(kept)
    values = kept[budget]
    left: dict[str, float] = {}
    sizes: dict[str, int] = {}
    several = len({site.kind for site in values.sites}) > 1
    for site, part in zip(values.sites, values.by_site(), strict=True):
        group = site.kind if several else site.label
        left[group] = left.get(group, 0.0) + float(part.sum())
        sizes[group] = sizes.get(group, 0) + site.gates
    parts = [f"{left[group]:.3g} of {sizes[group]} in {group}" for group in left]
    emptied = [
        site.label for site, part in zip(values.sites, values.by_site(), strict=True) if several and float(part.sum()) == 0
    ]
    text = f"Of {len(values.values)} heads, {method} keeps at a budget of {budget}: {listed(parts)}."
    return text + (f" No head is left in {listed(emptied)}." if emptied else "")


def scores(his: Values | None, entropy: Values | None) -> str:
    """Where HIS and entropy are highest."""
    parts = [
        f"{name} is highest in {values.sites[int(np.argmax(means))].label} (layer mean {max(means):.3g}) and lowest in "
        f"{values.sites[int(np.argmin(means))].label} ({min(means):.3g})"
        for name, values in (("HIS", his), ("Entropy", entropy))
        if values is not None and (means := [float(part.mean()) for part in values.by_site()])
    ]
    return f" {'; '.join(parts)}." if parts else ""


def training(course: Course, method: str, budget: int) -> str:
    """From how many to how many open heads, when half had closed, and where the last are."""
    total, by_site = course.open.sum(axis=1), course.by_site()
    first, last = float(total[0]), float(total[-1])
    text = f"{method}, budget {budget}: {first:.3g} open heads at step {course.steps[0]}, "
    if course.ends_in_mask:
        text += f"{total[-2]:.3g} at step {course.steps[-2]}, then the {last:.3g} of the mask (drawn last)."
    else:
        text += f"{last:.3g} at step {course.steps[-1]}."
    if last < first:
        reached = int(np.argmax(total <= (first + last) / 2))
        half = int(course.steps[min(reached, len(course.steps) - 1 - course.ends_in_mask)])  # the mask has no step of its own
        most = int(np.argmax(by_site[-1]))
        empty = [site.label for site, count in zip(course.sites, by_site[-1], strict=True) if count == 0]
        text += f" Half of those that close have closed by step {half}."
        if by_site[-1].min() < by_site[-1].max():
            text += f" Most stay in {course.sites[most].label} ({by_site[-1][most]:.3g} of {course.sites[most].gates})"
            text += f", none in {listed(empty)}." if empty else "."
    return text


def gates(course: Course, method: str, budget: int) -> str:
    """How far the gates came from all open towards 0 and 1."""
    last = course.values[-1]
    between = int(((last > 0) & (last < 1)).sum())
    trained = len(course.steps) - 1 - course.ends_in_mask  # the mask has no step of its own
    soft = f", {between} between 0 and 1" if between and course.seeds == 1 else ""
    first, final = float(course.open[0].sum()), float(course.open[trained].sum())
    mask = f", then {course.open[-1].sum():.3g} in the mask" if course.ends_in_mask else ""
    mean = f", the mean of {course.seeds} seeds" if course.seeds > 1 else ""
    return (
        f"The gates of {method} with budget {budget} as they train{mean}: of {len(last)}, {first:.3g} are open at step "
        f"{course.steps[0]} and {final:.3g} at step {course.steps[trained]}{mask}{soft}."
    )


def agreement(rows: pd.DataFrame, budget: int, heads: int | None) -> str:
    """The most and least alike pairs, against chance, and methods with themselves over seeds."""
    ends = [" ".join(sorted(map(str, pair))) for pair in zip(rows["method"], rows["other"], strict=True)]
    rows = rows.assign(pair=ends).drop_duplicates("pair")  # a pair may be listed from both its ends
    pairs, selves = rows[rows["method"] != rows["other"]], rows[rows["method"] == rows["other"]].dropna(subset="jaccard")
    text = f"Masks of {budget}{f' of {heads}' if heads else ''} heads."
    if len(pairs):
        most, least = _highest(pairs, "jaccard"), _highest(pairs.assign(apart=-pairs["jaccard"]), "apart")
        text += f" Most alike are {most['method']} and {most['other']} (Jaccard index {most['jaccard']:.2f})"
        text += f", least {least['method']} and {least['other']} ({least['jaccard']:.2f})." if len(pairs) > 1 else "."
    if len(rows):
        low, high = rows["chance_jaccard"].min(), rows["chance_jaccard"].max()
        chance = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        above = int((pairs["jaccard"] > pairs["chance_jaccard"]).sum())
        text += f" Random masks of these sizes would share {chance}; {above} of {counted(len(pairs), 'pair')} share more."
    if len(selves):
        best = _highest(selves, "jaccard")
        text += f" Between seeds, {best['method']} repeats itself best ({best['jaccard']:.2f})."
    return text


def his_against_entropy(his: Values, entropy: Values, kept: Values | None, method: str) -> str:
    """How HIS and entropy go together, and how many of the kept heads HIS alone would have kept."""
    count = len(his.values)
    constant = np.ptp(his.values) == 0 or np.ptp(entropy.values) == 0
    text = f"Over {count} heads, "
    if constant or count < 3:
        text += "HIS and entropy cannot be correlated."
    else:
        found = spearmanr(his.values, entropy.values)
        word = "rise together" if found.statistic > 0 else "go against each other"
        firm = "" if found.pvalue < 0.05 else ", which may be chance"
        text += f"HIS and entropy {word} (Spearman's rho {found.statistic:.2f}, {p_value(found.pvalue)}{firm})."
    if kept is not None and len(kept.values) == count:
        inside = kept.values >= 0.5
        highest = np.argsort(-his.values, kind="stable")[: inside.sum()]
        same = int(inside[highest].sum())
        text += f" Of the {inside.sum()} heads that {method} keeps, {same} are among the {inside.sum()} of highest HIS."
    return text


def cost(contents: Contents) -> str:
    """What the stages took, and the dearest method."""
    rows = contents.comparison
    parts = []
    for stage in contents.stages:
        of_stage = rows[(rows["stage"] == stage) & ~is_dense(rows)]
        if not len(of_stage) or "seconds" not in of_stage:
            continue
        means = of_stage.groupby("method", sort=False)["seconds"].mean()
        steps = sorted(set(of_stage["steps"])) if "steps" in of_stage else []
        said = "" if not steps else f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        most = f", most for {means.idxmax()} ({duration(float(means.max()))})" if len(means) > 1 else ""
        taken = f"{said + ' steps, ' if said else ''}{duration(float(means.mean()))} per cell in the mean"
        parts.append(f"{STAGE_WORDS.get(stage, stage)}: {taken}{most}")
    return ". ".join(parts) + "." if parts else "The costs were not recorded."


def headline(contents: Contents) -> list[str]:
    """In place of a verdict: the caption of every stage, the trained ones first."""
    return [quality(contents, stage) for stage in sorted(contents.stages, key=lambda stage: stage == "post hoc")]
