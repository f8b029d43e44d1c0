"""Captions that state the result of a picture or table, made from its numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from training.config.comparison import is_post_hoc
from training.report.contents import Course, ReportData, Site, Values, is_dense
from training.stats.numbers import counted, duration, listed, quantity, shown, unit
from training.stats.significance import SEEDS_FOR_A_CLAIM, SIGNIFICANCE
from training.stats.verdict import nothing_learned, regime

STAGE_WORDS = {
    "post hoc": "With the mask alone (post hoc)",
    "post hoc with means": "With the mask alone and the mean output of closed heads (post hoc with means)",
    "post hoc with optimal constants": "With the mask alone and fitted constants in place of closed heads (post hoc with "
    "optimal constants)",
    "post hoc with uniform attention": "With the mask alone and uniform attention of closed heads (post hoc with uniform "
    "attention)",
    "retrained": "Retrained with the mask",
    "retrained from dense": "Retrained with the mask from the dense model on, for equally many steps",
    "retrained at equal total cost": "Retrained with the mask for as long as finding it left over (equal total cost)",
    "from scratch": "Trained from scratch with the mask",
}

CLAIM = f" Significant means p < {SIGNIFICANCE:g}, corrected for all pairs of methods (Holm)."
NO_CLAIM = f" With fewer than {SEEDS_FOR_A_CLAIM} seeds no difference is called significant."


def quality(contents: ReportData, stage: str) -> str:
    """Which method is best at each budget of a stage, how many others it is ahead of, and what the dense model has."""
    metric, (highest, worst) = contents.metric, contents.best_and_worst
    rows = contents.summary[contents.summary["stage"] == stage]
    dense, rows = rows[rows["method"] == "dense"], rows[~is_dense(rows)].dropna(subset=["mean"])
    parts, lowest = [], ""
    for budget in contents.budgets:
        at_budget = contents.best_first(rows[rows["budget"] == budget])
        if len(at_budget):
            parts.append(f"at {contents.label(budget)} {_best(contents, at_budget)}")
        if len(at_budget) > 1:
            last = at_budget.iloc[-1]
            differs = last["mean"] != at_budget["mean"].iloc[0]
            said = f" {worst.capitalize()} at {contents.label(budget)}: {last['method']}, {quantity(metric, last['mean'])}."
            lowest = said if differs else ""
    if not parts:
        return f"{STAGE_WORDS.get(stage, stage)} there is only the dense model."
    text = f"{STAGE_WORDS.get(stage, stage)}, {highest} test {metric}: {'; '.join(parts)}.{lowest}"
    if "ahead" in text:
        text += NO_CLAIM if "in every seed" in text else CLAIM
    if len(dense):
        text += f" Dense: {quantity(metric, dense['mean'].iloc[0])}."
    return text + _of_seeds(rows)


def _best(contents: ReportData, rows: pd.DataFrame) -> str:
    """The first of rows, the best first, those equal to it, and how many of the others it is ahead of."""
    top = rows[rows["mean"] == rows["mean"].iloc[0]]
    return f"{listed(list(top['method']))}, {quantity(contents.metric, top['mean'].iloc[0])}{_ahead(contents, rows, 'rival')}"


def _ahead(contents: ReportData, rows: pd.DataFrame, noun: str) -> str:
    """In brackets, how many of rows, the best first, their first is ahead of, in the words that so many seeds allow;
    empty where no pairs were compared.

    Args:
        contents: with the tests.
        rows: of a stage and a budget.
        noun: what the others are called.
    """
    tests, best = contents.statistics, rows.iloc[0]
    if tests is None or not len(tests):
        return ""
    rivals = rows.loc[rows["mean"] != best["mean"], "method"]
    here = (tests["stage"] == best["stage"]) & (tests["budget"] == best["budget"]) & (tests["method"] == best["method"])
    pairs = tests[here & tests["rival"].isin(rivals)]
    if not len(pairs):
        return ""
    seeds = int(pairs["seeds"].min())
    if regime(seeds) == "few":
        return f" (ahead of {int((pairs['ahead'] == pairs['seeds']).sum())} of {counted(len(pairs), noun)} in every seed)"
    count = f"{int((pairs['p_holm'] < SIGNIFICANCE).sum())} of {counted(len(pairs), noun)}"
    return f" (significantly ahead of {count}{' for this one seed' * (seeds == 1)})"


def results(contents: ReportData) -> str:
    """The best trained result, or the best of all where nothing was trained on."""
    rows = contents.summary.dropna(subset=["mean"])
    trained = rows[~is_dense(rows) & ~rows["stage"].map(is_post_hoc).astype(bool)]
    rows = trained if len(trained) else rows[~is_dense(rows)]
    if not len(rows):
        return f"Test {contents.metric} of the dense model."
    best, word = contents.best_first(rows).iloc[0], contents.best_and_worst[0].capitalize()
    return (
        f"Test {contents.metric} per stage, method and {contents.unit}s kept. {word}{' after training' * bool(len(trained))}: "
        f"{best['method']} at {contents.label(int(best['budget']))}, {best['stage']}, with "
        f"{quantity(contents.metric, best['mean'])}. Column titles sort."
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


def curve(contents: ReportData) -> str:
    """The best ranking at each budget of a run's curve."""
    assert contents.curve is not None
    metric = contents.metric
    parts = []
    for heads, rows in contents.curve.sort_values("heads", ascending=False).groupby("heads", sort=False):
        best = rows[rows[f"select_{metric}"] == contents.best_first(rows, f"select_{metric}")[f"select_{metric}"].iloc[0]]
        named = f"{listed(list(best['method']))} with {quantity(metric, float(best[f'select_{metric}'].iloc[0]))}"
        parts.append(f"at {counted(int(str(heads)), 'head')} {named}")
    return f"With the mask alone, the best {metric} on the selection split: {'; '.join(parts)}. One seed."


def masks(contents: ReportData, budget: int, method: str) -> str:
    """Where one method's heads are, and which heads all methods agree on, of those that can go within the budget."""
    kept = contents.kept(method, budget)
    assert kept is not None
    sites, counts = kept.sites, [float(part.sum()) for part in kept.by_site()]
    among = [index for index, site in enumerate(sites) if contents.prunes(site, budget)]
    most, fewest = max(among, key=counts.__getitem__), min(among, key=counts.__getitem__)
    text = f"At {budget} of {contents.label(len(kept.values))}{contents.of_kinds(budget)}, {method} keeps "
    if counts[most] == counts[fewest]:
        text += f"{counts[most]:.3g} in every layer."
    else:
        text += (
            f"most in {sites[most].label} ({counts[most]:.3g} of {sites[most].gates}) and fewest in {sites[fewest].label} "
            f"({counts[fewest]:.3g} of {sites[fewest].gates})."
        )
    can_go = np.repeat([contents.prunes(site, budget) for site in sites], [site.gates for site in sites])
    shares = [
        found.values for name, at in contents.masks if at == budget and (found := contents.kept(name, budget)) is not None
    ]
    if len(shares) > 1 and len({len(share) for share in shares}) == 1:
        always = int((np.min(shares, axis=0) == 1)[can_go].sum())
        never = int((np.max(shares, axis=0) == 0)[can_go].sum())
        text += (
            f" All {len(shares)} methods agree in every seed on {counted(always, contents.unit)} to keep and "
            f"{counted(never, contents.unit)} to give up."
        )
    again = [name for name, at in contents.masks if (name, at) in contents.searched_again and at == budget]
    if again:
        text += f" The masks of {listed(again)} are those of trained weights; other ones were searched on the dense model."
    seeds = max(len(masks) for _, masks in contents.masks.values())
    return text + (f" Masks show the share of {seeds} seeds that keep a {contents.unit}." if seeds > 1 else "")


def kept_by_site(kept: dict[int, Values], method: str, unit: str) -> str:
    """How much of each kind, or of which layers, is left at the smallest budget, in heads or groups."""
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
    text = f"Of {counted(len(values.values), unit)}, {method} keeps at a budget of {budget}: {listed(parts)}."
    return text + (f" No {unit} is left in {listed(emptied)}." if emptied else "")


def prices(sites: tuple[Site, ...], counts: np.ndarray, ticks: list[str], method: str) -> str:
    """How many gates of each kind the lowest and the highest price leave open.

    Args:
        sites: of the model.
        counts: open gates ``[prices, sites]``, by rising price.
        ticks: the prices.
        method: that trained with them.
    """
    parts = []
    for kind in dict.fromkeys(site.kind for site in sites):
        members = [site.kind == kind for site in sites]
        of_kind, size = counts[:, members].sum(axis=1), sum(site.gates for site in sites if site.kind == kind)
        parts.append(f"{of_kind[0]:.3g} and {of_kind[-1]:.3g} of {size} in {kind}")
    ends = [f"{counts[end].sum():.3g} at the {word} price ({ticks[end]})" for end, word in ((0, "lowest"), (-1, "highest"))]
    return f"Gates that {method} leaves open: {' and '.join(ends)}; {', '.join(parts)}."


def scores(his: Values | None, entropy: Values | None) -> str:
    """Where HIS and entropy are highest."""
    parts = [
        f"{name} is highest in {values.sites[int(np.argmax(means))].label} (layer mean {max(means):.3g}) and lowest in "
        f"{values.sites[int(np.argmin(means))].label} ({min(means):.3g})"
        for name, values in (("HIS", his), ("Entropy", entropy))
        if values is not None and (means := [float(part.mean()) for part in values.by_site()])
    ]
    return f" {'; '.join(parts)}." if parts else ""


def training(contents: ReportData, course: Course, method: str, budget: int) -> str:
    """From how many to how many open heads, when half had closed, and where the last are of those that could go."""
    total, left = course.open.sum(axis=1), course.by_site()[-1]
    first, last, trained = float(total[0]), float(total[-1]), course.last_trained
    text = f"{method}, {contents.label(budget)}: {first:.3g} open at step {course.steps[0]}, "
    if course.ends_in_mask:
        text += f"{total[trained]:.3g} at step {course.steps[trained]}, then the {last:.3g} of the mask (drawn last)."
    else:
        text += f"{last:.3g} at step {course.steps[-1]}."
    if last < first:
        reached = int(np.argmax(total <= (first + last) / 2))
        half = int(course.steps[min(reached, trained)])
        among = [index for index, site in enumerate(course.sites) if contents.prunes(site, budget)]
        most = max(among, key=left.__getitem__)
        empty = [course.sites[index].label for index in among if left[index] == 0]
        text += f" Half of those that close have closed by step {half}."
        if min(left[among]) < left[most]:
            text += f" Most stay in {course.sites[most].label} ({left[most]:.3g} of {course.sites[most].gates})"
            text += f", none in {listed(empty)}." if empty else "."
    return text


def gates(contents: ReportData, course: Course, method: str, budget: int) -> str:
    """How far the gates came from all open towards 0 and 1."""
    last = course.values[-1]
    between = int(((last > 0) & (last < 1)).sum())
    trained = course.last_trained
    soft = f", {between} between 0 and 1" if between and course.seeds == 1 else ""
    first, final = float(course.open[0].sum()), float(course.open[trained].sum())
    mask = f", then {course.open[-1].sum():.3g} in the mask" if course.ends_in_mask else ""
    mean = f", the mean of {course.seeds} seeds" if course.seeds > 1 else ""
    return (
        f"The gates of {method} for {contents.label(budget)} as they train{mean}: of {len(last)}, {first:.3g} are open at step "
        f"{course.steps[0]} and {final:.3g} at step {course.steps[trained]}{mask}{soft}."
    )


def agreement(contents: ReportData, rows: pd.DataFrame, budget: int) -> str:
    """The most and least alike pairs, against chance, and methods with themselves over seeds."""
    ends = [" ".join(sorted(map(str, pair))) for pair in zip(rows["method"], rows["other"], strict=True)]
    rows = rows.assign(pair=ends).drop_duplicates("pair")  # a pair may be listed from both its ends
    pairs, selves = rows[rows["method"] != rows["other"]], rows[rows["method"] == rows["other"]].dropna(subset="jaccard")
    of = f"{budget} of {contents.label(contents.size)}{contents.of_kinds(budget)}" if contents.size else contents.label(budget)
    text = f"Masks of {of}."
    if len(pairs):
        most, least = _highest(pairs, "jaccard"), _highest(pairs.assign(apart=-pairs["jaccard"]), "apart")
        text += f" Most alike are {most['method']} and {most['other']} (Jaccard index {most['jaccard']:.2f})"
        text += f", least {least['method']} and {least['other']} ({least['jaccard']:.2f})." if len(pairs) > 1 else "."
    if len(rows):
        low, high = rows["chance_jaccard"].min(), rows["chance_jaccard"].max()
        chance = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        above = int((pairs["jaccard"] > pairs["chance_jaccard"]).sum())
        text += f" Random masks of these sizes would share {chance}; {above} of {len(pairs)} pairs share more."
    if len(selves):
        best = _highest(selves, "jaccard")
        text += f" Between seeds, {best['method']} repeats itself best ({best['jaccard']:.2f})."
    return text


def his_against_entropy(his: Values, entropy: Values, kept: Values | None, method: str) -> str:
    """How HIS and entropy go together, and how many of the kept heads are among those of highest HIS."""
    count = len(his.values)
    constant = np.ptp(his.values) == 0 or np.ptp(entropy.values) == 0
    text = f"Over {count} heads, "
    if constant or count < 3:
        text += "HIS and entropy cannot be correlated."
    else:
        found = spearmanr(his.values, entropy.values)
        word = "rise together" if found.statistic > 0 else "go against each other"
        text += f"HIS and entropy {word} (Spearman's rho {found.statistic:.2f})."
    if kept is not None and len(kept.values) == count:
        inside = kept.values >= 0.5
        highest = np.argsort(-his.values, kind="stable")[: inside.sum()]
        same = int(inside[highest].sum())
        seeds = " in at least half of the seeds" if ((kept.values > 0) & (kept.values < 1)).any() else ""
        text += f" Of the {inside.sum()} heads that {method} keeps{seeds}, {same} are among the {inside.sum()} of highest HIS."
    return text


def cost(contents: ReportData) -> str:
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
        taken = f"{said + ' steps, ' if said else ''}{duration(float(means.mean()))} per experiment in the mean"
        parts.append(f"{STAGE_WORDS.get(stage, stage)}: {taken}{most}")
    return ". ".join(parts) + "." if parts else "The costs were not recorded."


def opening(contents: ReportData) -> str:
    """The result in one sentence: at the middle budget of the stage that counts most, the best method, the best of this
    project's own (the one that does best on the selection split), and the dense model."""
    if not len(contents.summary) or contents.focus is None:
        return "There are no results yet."
    metric, stage = contents.metric, contents.stages_by_weight[0]
    rows = contents.summary[contents.summary["stage"] == stage].dropna(subset=["mean"])
    dense, rows = rows[rows["method"] == "dense"], rows[~is_dense(rows) & (rows["budget"] == contents.focus)]
    if not len(rows):
        return f"There is only the dense model at {contents.label(contents.focus)}."
    rows = contents.best_first(rows)
    best = list(rows.loc[rows["mean"] == rows["mean"].iloc[0], "method"])
    of = f" of {contents.size}" if contents.size else ""
    share, highest = "has" if len(best) == 1 else "share", contents.best_and_worst[0]
    text = f"{STAGE_WORDS.get(stage, stage)}, {contents.label(contents.focus)}{of}: {listed(best)} {share} the {highest} test "
    parts = []
    own = rows[rows["method"].isin(contents.ours)]
    if len(own):
        by = "select_mean" if "select_mean" in own and own["select_mean"].notna().all() else "mean"
        chosen = contents.best_first(own, by).iloc[0]
        if chosen["method"] not in best:
            parts.append(f"{chosen['method']} has {quantity(metric, chosen['mean'])}")
    if len(dense):
        parts.append(f"the dense model{' has' * (not parts)} {quantity(metric, dense['mean'].iloc[0])}")
    beside, seed = _ahead(contents, rows, "other"), " (one seed)" if "seeds" in rows and rows["seeds"].max() == 1 else ""
    return f"{text}{metric}, {quantity(metric, rows['mean'].iloc[0])}{beside}{'; ' * bool(parts)}{listed(parts)}{seed}."


def warning(contents: ReportData) -> str:
    """Of a dense model that has learned nothing; else empty."""
    metric, rows = contents.metric, contents.summary
    if contents.majority is None or not len(rows):
        return ""
    means = shown(metric, rows.loc[is_dense(rows), "mean"].dropna())
    return nothing_learned(means, shown(metric, contents.majority), unit(metric))


def headline(contents: ReportData) -> list[str]:
    """In place of a verdict: the caption of every stage, the trained ones first."""
    return [quality(contents, stage) for stage in contents.stages_by_weight]
