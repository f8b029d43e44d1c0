"""The sentences of a report that state a result, made from its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from training.config.comparison import is_retrained
from training.report.contents import ReportData, is_dense
from training.stats.numbers import counted, listed, number, quantity, shown, signed, unit
from training.stats.significance import SIGNIFICANCE
from training.stats.verdict import nothing_learned, regime

FASTER = 1.02
"""The least ratio of dense to pruned latency that counts as faster: less is within the noise of the measurement."""
STAGE_TITLES = {
    "post hoc": "without training (post hoc)",
    "post hoc with means": "without training, closed heads at their mean",
    "post hoc with optimal constants": "without training, closed heads at fitted constants",
    "post hoc with uniform attention": "without training, closed heads attend uniformly",
    "retrained": "retrained with the mask",
    "retrained from dense": "retrained with the mask, all equally long",
    "retrained at equal total cost": "retrained, finding the mask paid for",
    "from scratch": "trained from scratch with the mask",
}


def words_of(stage: str) -> str:
    """Return the title of a stage as the beginning of a sentence."""
    words = STAGE_TITLES.get(stage, stage)
    return words[:1].upper() + words[1:]


def outcome(run: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Return sentences on a run's final model: ``budget``, ``choice``, ``refit``, ``quality`` and ``size``.

    Args:
        run: The entry ``run`` of ``metrics.json``.
    """
    sentences = {}
    if search := run.get("budget_search"):
        point = next(point for point in search["points"] if point["heads"] == search["budget"])
        sentences["budget"] = (
            f"{search['budget']} is the smallest budget tried whose {search['method']} loses at most {search['max_loss']:g} "
            f"{search['measure']} of {metric} on the selection split; it loses {point['loss']:z.2f} "
            f"(95 % interval {point['low']:z.2f} to {point['high']:z.2f}); the upper end decides"
        )
    if reached := run.get("selection"):
        best = run["method"]
        others = ", ".join(f"{name} {number(metric, value)}" for name, value in reached.items() if name != best)
        kept = f"kept {counted(run['kept'], 'head')}, those of {best}: {metric} on the selection split is "
        kept += quantity(metric, reached[best])
        lead, last = run.get("lead") or {}, run.get("result", {}).get(f"select_{metric}", reached[best])
        is_unsure = bool(lead) and lead["low"] <= 0 <= lead["high"]
        chance = f"; the difference to {lead['second']} there is not significant" if is_unsure else ""
        trained = f"; after training it is {quantity(metric, last)}" if last != reached[best] else ""
        sentences["choice"] = f"{kept} ({others}){chance}{trained}"
    if dropped := run.get("refits_dropped"):
        worse = "was clearly worse on the selection split than the mask alone"
        sentences["refit"] = f"the refit of {listed(dropped)} is left out, because it {worse}"
    if found := run.get("against_dense"):
        low, high = (number(metric, found[name]) for name in ("low", "high"))
        lost = [signed(shown(metric, found[f"difference{end}"])) for end in ("", "_low", "_high")]
        dense = "retrained dense model" if found.get("retrained") else "dense model"
        if is_retrained(run.get("result", {}).get("stage", "")) and not found.get("retrained"):
            dense += ", which trained less,"
        sentences["quality"] = (
            f"test {metric} {quantity(metric, found['value'])} (95 % interval {low} to {high}); against the {dense} {lost[0]} "
            f"(95 % interval {lost[1]} to {lost[2]})"
        )
    if size := run.get("cost"):
        faster = ", ".join(f"{row['ratio']:.2f} x at batch size {row['batch_size']}" for row in size["latency"])
        share = 1 - size["pruned_parameters"] / size["dense_parameters"]
        fewer = f"{size['pruned_parameters']:,} parameters ({100 * share:.1f} % fewer)"
        sentences["size"] = f"{fewer}; speed {faster}, on {size['hardware']}"
    return sentences


def warnings(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons against using the pruned model of a run, from its ``metrics.json``.

    The selection split decides, and the test split only whether a model is above the majority class.
    """
    run = metrics.get("run", {})
    found = run.get("against_dense")
    if not found:
        return
    metric = metrics["main_metric"]
    majority = metrics.get("majority", {}).get(metric)
    if found.get("select_lost"):
        more = "give a smaller --model.max_loss" if run.get("budget_search") else "keep more heads (--model.budget)"
        yield (
            "on the selection split the pruned model is worse than the dense one, and the interval of the difference excludes "
            f"0; {more}, or train it longer (--model.retrain)"
        )
    dense = max(row[f"test_{metric}"] for row in run["dense"].values())
    if majority is not None and found["value"] <= majority < dense:
        yield f"the pruned model is not above the majority class, {quantity(metric, majority)}"
    reached, of_random = run.get("selection", {}).get(run["method"]), run.get("random")
    if None not in (reached, of_random) and (reached >= of_random if metrics.get("lower_is_better") else reached <= of_random):
        yield (
            f"on the selection split the kept heads ({quantity(metric, reached)}) are not above random heads "
            f"({quantity(metric, of_random)}), each refitted where that helps"
        )
    measured = run.get("cost", {}).get("latency", [])
    slower = [f"{row['ratio']:.2f} x at batch {row['batch_size']}" for row in measured if row["ratio"] < 1 / FASTER]
    if measured and all(row["ratio"] < FASTER for row in measured):
        sizes = ", ".join(str(row["batch_size"]) for row in measured)
        least = f"{100 * (FASTER - 1):.0f} %"
        smaller = "; it is smaller all the same" if run["cost"]["pruned_parameters"] < run["cost"]["dense_parameters"] else ""
        yield f"the pruned model is less than {least} faster on this device (batch {sizes}){smaller}"
    elif slower:
        yield f"the pruned model is slower than the dense one on this device ({', '.join(slower)})"


def card_notes(metrics: Mapping[str, Any]) -> list[str]:
    """Return the sentences of a model card behind its results: the quality with its interval, and the warnings."""
    found = outcome(metrics["run"], metrics["main_metric"]).get("quality")
    notes = [*([found] if found else []), *(f"**warning:** {sentence}" for sentence in warnings(metrics))]
    return [f"- {note}" for note in notes]


def opening(contents: ReportData) -> str:
    """Return the result in one sentence: the heads and the quality of a run, or the best method of a comparison."""
    run = contents.metrics.get("run", {})
    if found := outcome(run, contents.metric).get("quality"):
        return f"{run['kept']} of {contents.metrics['heads']} heads kept ({run['method']}): {found}."
    return best_method(contents, next(iter(contents.stages_by_weight), ""))


def outcome_of_run(contents: ReportData) -> list[str]:
    """Return the further sentences of :func:`outcome`, :func:`warnings`, and the folder of the model."""
    found = outcome(contents.metrics.get("run", {}), contents.metric)
    found.pop("quality", None)
    against = [f"warning: {sentence}" for sentence in warnings(contents.metrics)]
    return [*found.values(), *against, *(["pruned model: export"] if (contents.path / "export").is_dir() else [])]


def best_method(contents: ReportData, stage: str) -> str:
    """Return the result of a stage at the middle budget: the best method and the best of this project's own.

    This project's own method is chosen on the selection split.
    """
    if not len(contents.summary) or contents.focus is None:
        return "There are no results yet."
    metric, rows = contents.metric, contents.ranked(stage)
    dense = contents.summary[contents.summary["method"] == "dense"].sort_values("stage", key=lambda name: name != stage)
    if not len(rows):
        return f"{words_of(stage)}, there is only the dense model at {contents.label(contents.focus)}."
    first, best = rows.iloc[0], list(rows.loc[rows["mean"] == rows["mean"].iloc[0], "method"])
    of = f" of {contents.size}" if contents.size else ""
    share, highest = "has" if len(best) == 1 else "share", "lowest" if contents.lower_is_better else "highest"
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
    """Return how many others the first of these means is ahead of, as far as the number of seeds allows."""
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
        ahead = int((pairs["ahead"] == pairs["seeds"]).sum())
        return f"; ahead of {ahead or 'none'} of {counted(len(pairs), 'other method')} in every seed"
    count = f"{int((pairs['p_holm'] < SIGNIFICANCE).sum()) or 'none'} of {counted(len(pairs), 'other method')}"
    return f"; significantly ahead of {count}{' for this one seed' * (seeds == 1)}"


def warning(contents: ReportData) -> str:
    """Return a warning if the dense model has learned nothing at the first stage; else an empty text."""
    metric, rows = contents.metric, contents.summary
    if contents.majority is None or not len(rows):
        return ""
    means = shown(metric, rows.loc[is_dense(rows), "mean"].dropna())
    return nothing_learned(means.head(1), shown(metric, contents.majority), unit(metric))
