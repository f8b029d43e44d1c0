"""Captions that state the result of a picture or table, made from its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from training.config.comparison import is_post_hoc
from training.report.contents import Course, ReportData, Sites, Values, is_dense
from training.stats.numbers import counted, duration, listed, number, quantity, shown, signed, unit
from training.stats.significance import SIGNIFICANCE, cross_table, pooled_odds
from training.stats.verdict import nothing_learned, regime

STAGE_TITLES = {
    "post hoc": "mask only (post hoc)",
    "post hoc with means": "mask only, closed heads at their mean",
    "post hoc with optimal constants": "mask only, closed heads at fitted constants",
    "post hoc with uniform attention": "mask only, closed heads attend uniformly",
    "retrained": "retrained with the mask",
    "retrained from dense": "retrained with the mask, all equally long",
    "retrained at equal total cost": "retrained, finding the mask paid for",
    "from scratch": "trained from scratch with the mask",
}


def words_of(stage: str) -> str:
    """Return what a stage is, as the beginning of a sentence."""
    words = STAGE_TITLES.get(stage, stage)
    return words[:1].upper() + words[1:]


def outcome(run: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Return what ``metrics.json`` says of a run's final model, in sentences: ``budget``, ``choice``, ``quality``
    and ``size``.

    Args:
        run: The entry ``run`` of ``metrics.json``.
        metric: The main metric.
    """
    said = {}
    if search := run.get("budget_search"):
        point = next(point for point in search["points"] if point["heads"] == search["budget"])
        said["budget"] = (
            f"{search['budget']} is the smallest budget at which {search['method']} loses at most {search['max_loss']:g} "
            f"{'points' if unit(metric) else '%'} of {metric} on the selection split: {point['loss']:.2f} (95 % interval "
            f"{point['low']:.2f} to {point['high']:.2f})"
        )
    if reached := run.get("selection"):
        best = run["method"]
        others = ", ".join(f"{name} {number(metric, value)}" for name, value in reached.items() if name != best)
        kept = f"kept the heads of {best}: refitted, {metric} on the selection split is {quantity(metric, reached[best])}"
        said["choice"] = f"{kept} ({others})"
    if found := run.get("against_dense"):
        low, high = (number(metric, found[name]) for name in ("low", "high"))
        lost = [signed(shown(metric, found[f"difference{end}"])) for end in ("", "_low", "_high")]
        said["quality"] = (
            f"test {metric} {quantity(metric, found['value'])} (95 % interval {low} to {high}); against the dense model "
            f"{lost[0]} (95 % interval {lost[1]} to {lost[2]})"
        )
    if size := run.get("cost"):
        faster = ", ".join(f"{row['ratio']:.2f} x at batch size {row['batch_size']}" for row in size["latency"])
        share = 1 - size["pruned_parameters"] / size["dense_parameters"]
        fewer = f"{size['pruned_parameters']:,} parameters ({100 * share:.1f} % fewer)"
        said["size"] = f"{fewer}; speed {faster}, on {size['hardware']}"
    return said


def opening(contents: ReportData) -> str:
    """Say the result in one sentence: what a run kept and how good that is, or the best method of a comparison."""
    run = contents.metrics.get("run", {})
    if found := outcome(run, contents.metric).get("quality"):
        return f"{run['kept']} of {contents.metrics['heads']} heads kept ({run['method']}): {found}."
    return best_method(contents, next(iter(contents.stages_by_weight), ""))


def outcome_of_run(contents: ReportData) -> list[str]:
    """Return what else the terminal says of a run's final model, and the folder of the model."""
    found = outcome(contents.metrics.get("run", {}), contents.metric)
    found.pop("quality", None)
    return [*found.values(), *(["pruned model: export"] if (contents.path / "export").is_dir() else [])]


def best_method(contents: ReportData, stage: str) -> str:
    """Say the result of a stage at the middle budget in one sentence: the best method and the best of this project's own.

    This project's own method is chosen on the selection split.
    """
    if not len(contents.summary) or contents.focus is None:
        return "There are no results yet."
    metric = contents.metric
    rows = contents.summary[contents.summary["stage"] == stage].dropna(subset=["mean"])
    rows = rows[~is_dense(rows) & (rows["budget"] == contents.focus)]
    dense = contents.summary[contents.summary["method"] == "dense"].sort_values("stage", key=lambda name: name != stage)
    if not len(rows):
        return f"{words_of(stage)}, there is only the dense model at {contents.label(contents.focus)}."
    rows = contents.best_first(rows)
    first, best = rows.iloc[0], list(rows.loc[rows["mean"] == rows["mean"].iloc[0], "method"])
    of = f" of {contents.size}" if contents.size else ""
    share, highest = "has" if len(best) == 1 else "share", contents.best_and_worst[0]
    text = f"{words_of(stage)}, {contents.label(contents.focus)}{of}: {listed(best)} {share} the {highest} test {metric}, "
    text += quantity(metric, first["mean"])
    if "low" in rows and not np.isnan(first["low"]):
        text += f" (95 % interval {number(metric, first['low'])} to {number(metric, first['high'])})"
    if len(dense):
        text += f"; against the dense model {signed(shown(metric, first['mean'] - dense['mean'].iloc[0]))}"
    ahead = _ahead(contents, rows)
    text += ahead
    own = rows[rows["method"].isin(contents.ours)]
    if len(own):
        by = "select_mean" if "select_mean" in own and own["select_mean"].notna().all() else "mean"
        chosen = contents.best_first(own, by).iloc[0]
        text += "" if chosen["method"] in best else f"; {chosen['method']} has {quantity(metric, chosen['mean'])}"
    if "one seed" not in ahead and "seeds" in rows and rows["seeds"].max() == 1:
        text += " (one seed)"
    return f"{text}."


def _ahead(contents: ReportData, rows: pd.DataFrame) -> str:
    """Say how many others the first of these means is ahead of, as far as the number of seeds allows."""
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
        return f"; ahead of {int((pairs['ahead'] == pairs['seeds']).sum())} of {counted(len(pairs), 'other')} in every seed"
    count = f"{int((pairs['p_holm'] < SIGNIFICANCE).sum())} of {counted(len(pairs), 'other')}"
    return f"; significantly ahead of {count}{' for this one seed' * (seeds == 1)}"


def results(contents: ReportData) -> str:
    """Name the best trained result, or the best of all without training."""
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


def curve(contents: ReportData) -> str:
    """Name the best ranking at each budget of a run's curve."""
    assert contents.curve is not None
    metric = contents.metric
    parts = []
    for heads, rows in contents.curve.sort_values("heads", ascending=False).groupby("heads", sort=False):
        best = rows[rows[f"select_{metric}"] == contents.best_first(rows, f"select_{metric}")[f"select_{metric}"].iloc[0]]
        named = f"{listed(list(best['method']))} with {quantity(metric, float(best[f'select_{metric}'].iloc[0]))}"
        parts.append(f"at {counted(int(str(heads)), 'head')} {named}")
    return f"With the mask alone, the best {metric} on the selection split: {'; '.join(parts)}. One seed."


def masks(contents: ReportData, budget: int) -> str:
    """Say how many heads all methods agree on, among those that can go within the budget."""
    kept = contents.kept_at(budget)
    first = next(iter(kept.values()))
    text = f"Masks of {budget} of {contents.label(len(first.values))}{contents.of_kinds(budget)}."
    if len(kept) > 1:
        pruned = contents.kinds.get(budget) or {site.kind for site in first.sites}  # other kinds stay whole
        can_go = np.repeat([site.kind in pruned for site in first.sites], [site.gates for site in first.sites])
        shares = np.stack([values.values for values in kept.values()])[:, can_go]
        always, never = int((shares == 1).all(axis=0).sum()), int((shares == 0).all(axis=0).sum())
        text += (
            f" All {len(kept)} methods agree in every seed on {counted(always, contents.unit)} to keep and "
            f"{counted(never, contents.unit)} to give up."
        )
    again = [name for name in kept if (name, budget) in contents.searched_again]
    if again:
        text += f" The masks of {listed(again)} are those of trained weights; other ones were searched on the dense model."
    seeds = max(len(masks) for _, masks in contents.masks.values())
    return text + (f" Masks show the share of {seeds} seeds that keep a {contents.unit}." if seeds > 1 else "")


def kept_by_site(sites: Sites, counts: np.ndarray, ticks: list[str], axis: str, method: str) -> str:
    """Say how many gates of each kind, or of each layer of a single kind, stay in the first and in the last column.

    Args:
        counts: The gates that stay, ``[columns, sites]``.
        axis: What the columns are.
    """
    groups = [site.kind if len({site.kind for site in sites}) > 1 else site.label for site in sites]
    parts = []
    for tick, row in ((ticks[0], counts[0]), (ticks[-1], counts[-1])):
        members = {group: [name == group for name in groups] for group in dict.fromkeys(groups)}
        each = [f"{row[own].sum():.3g} in {group}" for group, own in members.items()]
        parts.append(f"{row.sum():.3g} at {tick} ({', '.join(each)})")
    return f"By {axis}, of {sum(site.gates for site in sites)} gates {method} keeps {' and '.join(parts)}."


def training(contents: ReportData, course: Course, method: str, budget: int) -> str:
    """Say from how many to how many open heads training goes, and when half of them had closed."""
    total = course.open.sum(axis=1)
    first, last, trained = float(total[0]), float(total[-1]), course.last_trained
    mean = f", the mean of {course.seeds} seeds" if course.seeds > 1 else ""
    text = f"{method}, {contents.label(budget)}{mean}: {first:.3g} open at step {course.steps[0]}, "
    text += f"{total[trained]:.3g} at step {course.steps[trained]}"
    text += f", then the {last:.3g} of the mask (drawn last)." if course.ends_in_mask else "."
    if last < first:
        half = min(int(np.argmax(total <= (first + last) / 2)), trained)
        text += f" Half of those that close have closed by step {course.steps[half]}."
    return text


def agreement(contents: ReportData, rows: pd.DataFrame, budget: int) -> str:
    """Name the most and the least alike pair, and the agreement of random masks."""
    ends = [" ".join(sorted(map(str, pair))) for pair in zip(rows["method"], rows["other"], strict=True)]
    rows = rows.assign(pair=ends).drop_duplicates("pair")  # a pair may be listed from both its ends
    pairs = rows[rows["method"] != rows["other"]].sort_values("jaccard", ascending=False, kind="stable")
    of = f"{budget} of {contents.label(contents.size)}{contents.of_kinds(budget)}" if contents.size else contents.label(budget)
    text = f"Masks of {of}."
    if len(pairs):
        most, least = pairs.iloc[0], pairs.iloc[-1]
        text += f" Most alike are {most['method']} and {most['other']} (Jaccard index {most['jaccard']:.2f})"
        text += f", least {least['method']} and {least['other']} ({least['jaccard']:.2f})." if len(pairs) > 1 else "."
    low, high = f"{rows['chance_jaccard'].min():.2f}", f"{rows['chance_jaccard'].max():.2f}"
    above = int((pairs["jaccard"] > pairs["chance_jaccard"]).sum())
    return (
        f"{text} Random masks of these sizes would share {low if low == high else f'{low} to {high}'}; "
        f"{above} of {len(pairs)} pairs share more."
    )


def his_against_entropy(his: Values, entropy: Values) -> str:
    """Say how HIS and entropy go together."""
    count = len(his.values)
    if count < 3 or np.ptp(his.values) == 0 or np.ptp(entropy.values) == 0:
        return f"Over {count} heads, HIS and entropy cannot be correlated."
    rho = stats.spearmanr(his.values, entropy.values).statistic
    word = "rise together" if rho > 0 else "go against each other"
    return f"Over {count} heads, HIS and entropy {word} (Spearman's rho {rho:.2f})."


def roles(table: pd.DataFrame, shown: list[str]) -> str:
    """Say how many heads are specialised, with an exact interval, and how many have each role."""
    total, special = len(table), int(table["specialised"].sum())
    low, high = stats.binomtest(special, total).proportion_ci(method="exact")
    held = table[[f"{name}_has" for name in shown]].sum(axis=1)
    each = listed([f"{int(table[f'{name}_has'].sum())} {name}" for name in shown]).capitalize() or "No role was measured"
    return (
        f"What each head does: {special} of {total} heads ({special / total:.0%}, 95 % interval {low:.0%} to {high:.0%}) are "
        f"specialised, {int((held == 0).sum())} have no role at all and {int((held > 1).sum())} have more than one, which "
        f"divide their square. {each}."
    )


def surviving_roles(contents: ReportData, special: np.ndarray) -> str:
    """Say which share of the specialised and of the other heads methods keep at the middle budget, with odds ratios."""
    caption = f"Roles of the {contents.unit}s that are kept, means over seeds; one with several roles counts in each."
    methods = [method for method, budget in contents.masks if budget == contents.focus]
    parts, seeds = [], 0
    for method in [name for name in ("learned", "his", "random") if name in methods] or methods[:3]:
        masks = contents.masks[method, contents.focus or 0][1]
        seeds = max(seeds, len(masks))
        if not (special.any() and (~special).any()):
            continue
        kept = [(masks > 0)[:, group].mean() for group in (special, ~special)]
        odds = pooled_odds([cross_table(mask, special) for mask in masks])
        sure = f", 95 % interval {odds.low:.2f} to {odds.high:.2f}" if np.isfinite(odds.low) else ""
        ratio = f" (odds ratio {odds.ratio:.2f}{sure})" if np.isfinite(odds.ratio) else ""
        parts.append(f"{method} keeps {kept[0]:.0%} of the specialised {contents.unit}s and {kept[1]:.0%} of the others{ratio}")
    if not parts or contents.focus is None:
        return caption
    return f"{caption} At {contents.label(contents.focus)}, {counted(seeds, 'seed')}: {'; '.join(parts)}."


def cost(contents: ReportData) -> str:
    """Say what the stages took, and which method took the most."""
    rows = contents.comparison
    parts = []
    for stage in contents.stages:
        of_stage = rows[(rows["stage"] == stage) & ~is_dense(rows)]
        if not len(of_stage) or "seconds" not in of_stage:
            continue
        means = of_stage.groupby("method", sort=False)["seconds"].mean()
        steps = sorted(set(of_stage["steps"])) if "steps" in of_stage else []
        steps_taken = "" if not steps else f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        most = f", most for {means.idxmax()} ({duration(float(means.max()))})" if len(means) > 1 else ""
        taken = f"{steps_taken + ' steps, ' if steps_taken else ''}{duration(float(means.mean()))} per experiment in the mean"
        parts.append(f"{words_of(stage)}: {taken}{most}")
    return ". ".join(parts) + "." if parts else "The costs were not recorded."


def warning(contents: ReportData) -> str:
    """Warn of a dense model that has learned nothing; else return an empty text."""
    metric, rows = contents.metric, contents.summary
    if contents.majority is None or not len(rows):
        return ""
    means = shown(metric, rows.loc[is_dense(rows), "mean"].dropna())
    return nothing_learned(means, shown(metric, contents.majority), unit(metric))
