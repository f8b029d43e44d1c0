"""The verdict of a comparison in plain English, without more claims than its tests support."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from training.stats.numbers import CLOSED, budget_label, counted, listed, scale, shown, signed
from training.stats.significance import SEEDS_FOR_A_CLAIM, SIGNIFICANCE, RankTest

ENOUGH = 0.9
"""The share of the closed heads that gates should close themselves."""
HINT = "more steps (--model.prune, --model.min_steps) close more in training"


def closed_by_gates_sentence(summary: pd.DataFrame, unit: str = "head") -> str:
    """Return a sentence on the share of heads that gates closed, by method and budget; empty without learned gates."""
    if CLOSED not in summary or summary[CLOSED].isna().all():
        return ""
    known = summary.dropna(subset=[CLOSED]).drop_duplicates(["method", "budget"])
    methods: dict[str, list[str]] = {}
    for method, own in known.groupby("method", sort=False):
        shares = zip(own[CLOSED], own["budget"], strict=True)
        text = listed([f"{100 * share:.0f} % at {counted(int(budget), unit)}" for share, budget in shares])
        methods.setdefault(text, []).append(str(method))
    each = "; ".join(f"{listed(names)} {text}" for text, names in methods.items())
    hint = f" Where it is under {100 * ENOUGH:.0f} %, {HINT}." if known[CLOSED].min() < ENOUGH else ""
    return (
        f"Share of the closed {unit}s that training itself closed; the rank of the gates closed the others (mean over the "
        f"seeds with a learned mask): {each}.{hint}"
    )


DENSE = "dense"
"""The method of the model that keeps all heads."""
EQUAL = 1e-5
"""Means that differ by less are equal, but for rounding."""
LEVEL_MEANS = 0.05
"""Means that differ by less print as the same number."""
INTERVALS = ", means over seeds, with 95 % intervals (Student's t over seeds, within the metric's bounds) in brackets. "
CORRECTED = "corrected by Holm's method for all pairs of methods tested at that stage and budget"
MEANS = {
    "one": " of one seed. The spread between seeds is unknown, so there is no winner. Significant means, for this one "
    f"seed, p < {SIGNIFICANCE:g} in a paired bootstrap over test examples, {CORRECTED}.",
    "few": f"{INTERVALS}Fewer than {SEEDS_FOR_A_CLAIM} seeds allow no test and no winner. The verdict states in how many seeds "
    "a method is behind. Where that is every seed, it has the least and the largest difference.",
    "enough": f"{INTERVALS}Significant means p < {SIGNIFICANCE:g} in a paired test over seeds and test examples, {CORRECTED}.",
}
"""The explanation of means by the number of seeds."""
TITLES = [
    "Significantly behind",
    "Not significantly behind",
    "For this one seed, significantly behind",
    "For this one seed, not significantly behind",
    "Behind in every seed",
    "Behind in the mean but not in every seed",
    "Not tested against it",
]
"""The groups of methods by their distance from the best one, in the order of the verdict."""
CHOICE = {
    "select_mean": "The best of this project's own methods has the highest mean on the selection split; it is compared with "
    "the best rival on test.",
    "mean": "Without results on a selection split, the best of this project's own methods is chosen on test, which favours it.",
}
"""The explanation of the choice among this project's own methods, by the column of the summary that decides."""


def is_dense(method: str) -> bool:
    """Return whether a method keeps all heads: the dense model, or the same trained with distillation."""
    return method.split("+")[0] == DENSE


def are_dense(methods: pd.Series) -> pd.Series:
    """Return which of these methods keep all heads."""
    return methods.astype(str).map(is_dense).astype(bool)


def verdict(
    summary: pd.DataFrame,
    statistics: pd.DataFrame,
    *,
    main_metric: str = "accuracy",
    lower_is_better: bool = False,
    ours: Sequence[str] = ("learned",),
    ranks: Mapping[str, tuple[pd.DataFrame, RankTest]] | None = None,
    kinds: Mapping[int, Mapping[str, int]] | None = None,
    unit: str = "head",
    within: Mapping[int, str] | None = None,
    majority: float | None = None,
) -> str:
    """Return Markdown on the method with the best mean at each stage and budget, and on the distance of the others.

    With :data:`training.stats.significance.SEEDS_FOR_A_CLAIM` or more seeds it lists methods that are significantly behind and
    those that are not. A winner needs every rival significantly behind (Holm) *and* no overlap of intervals over seeds. With
    2 to 4 seeds it lists the methods that are behind in every seed, without a claim. With one seed it names no winner, gives
    no ranks, and restricts every test to this seed. The best of this project's own methods is chosen on the selection split,
    because a choice on test would favour it.

    Args:
        lower_is_better: Whether the lowest value of the metric is the best.
        ours: This project's own methods; the others are the rivals.
        ranks: The results of :func:`training.stats.tables.rank_methods` by stage.
        kinds: By budget, the kept heads of each pruned kind, for a budget per kind.
        within: By budget, the time of a budget in time.
        majority: The score of always answering the most frequent class.
    """
    summary = summary.assign(**{name: shown(main_metric, summary[name]) for name in ("mean", "low", "high") if name in summary})
    has_selection = "select_mean" in summary and bool(summary["select_mean"].notna().all())
    chosen_by = "select_mean" if has_selection else "mean"
    seeds = statistics["seeds"] if len(statistics) else summary["seeds"]
    has_means = bool(seeds.max() > 1)
    choice = CHOICE[chosen_by] if summary["method"].isin(list(ours)).any() else ""
    lines = ["# Verdict", "", _heading(seeds, main_metric, choice, lower_is_better)]
    counts: list[str] = []
    for stage, of_stage in summary.groupby("stage", sort=False):
        dense = of_stage[are_dense(of_stage["method"])]
        budgets = of_stage[~are_dense(of_stage["method"])]
        if budgets.empty:
            continue
        lines += ["", f"## {str(stage).capitalize()}", ""]
        if warning := nothing_learned(dense["mean"], None if majority is None else shown(main_metric, majority)):
            lines += [f"**Warning.** {warning}", ""]
        if len(dense):
            lines += [f"Dense, with all {counted(int(dense['budget'].iloc[0]), unit)}: {_value(dense.iloc[0])}.", ""]
        held, compared = 0, 0
        for budget, own in budgets.groupby("budget", sort=False):
            tests = statistics[(statistics["stage"] == stage) & (statistics["budget"] == budget)]
            at_budget = _BudgetVerdict(own, tests, dense, ours, chosen_by, main_metric, lower_is_better)
            number = int(str(budget))
            label = budget_label(number, (kinds or {}).get(number, {}), unit, (within or {}).get(number, ""))
            lines.append(f"- **{label}**: {' '.join(at_budget.sentences())}")
            if at_budget.compares:
                compared += 1
                held += at_budget.own_holds
        if has_means and ranks is not None and stage in ranks and budgets["method"].nunique() > 1:
            lines += ["", _ranks(*ranks[str(stage)])]
        if compared:
            counts.append(f"{held} of {counted(compared, 'budget')} {stage}")
    if counts:
        lines += [
            "",
            f"The mean of the best of this project's own methods is at or {'below' if lower_is_better else 'above'} every "
            f"rival's at {', '.join(counts)}.",
        ]
    if decided := closed_by_gates_sentence(summary, unit):
        lines += ["", decided]
    return "\n".join(lines) + "\n"


def _heading(seeds: pd.Series, main_metric: str, choice: str, lower_is_better: bool) -> str:
    """Return the sentences on how to read the numbers.

    Args:
        choice: The explanation of the choice among this project's own methods; empty without any.
    """
    regimes = dict.fromkeys(regime(int(count)) for count in sorted(set(seeds)))
    numbers = f"Numbers are test {main_metric}{scale(main_metric)}{' (lower is better)' * lower_is_better}"
    explained = " Others are ".join(MEANS[name].lstrip(", " * place) for place, name in enumerate(regimes))
    if lower_is_better:
        choice = choice.replace("highest", "lowest")
    return numbers + explained + (f" {choice}" if choice and list(regimes) != ["one"] else "")


def regime(seeds: int) -> str:
    """Return the class of a number of seeds: ``one``, ``few`` or ``enough`` for a test."""
    return "one" if seeds == 1 else "few" if seeds < SEEDS_FOR_A_CLAIM else "enough"


def nothing_learned(dense: pd.Series, majority: float | None, unit: str = "") -> str:
    """Return a warning if the dense model is no better than always answering the most frequent class, else an empty text."""
    if majority is None or not len(dense) or dense.max() > majority + EQUAL:
        return ""
    return (
        f"The dense model, at {dense.max():z.1f}{unit}, is not above the majority class: always answering the most frequent "
        f"label of the test split would score {majority:z.1f}{unit}. It has learned nothing, so a comparison of its heads says "
        "nothing; check the labels, train longer (--model.finetune), or change the learning rate."
    )


class _BudgetVerdict:
    """The sentences on one budget at one stage: the methods by their means, and how pairs of them compare."""

    def __init__(
        self,
        methods: pd.DataFrame,
        tests: pd.DataFrame,
        dense: pd.DataFrame,
        ours: Sequence[str],
        chosen_by: str,
        metric: str,
        lower_is_better: bool,
    ) -> None:
        self.sign, self.better, self.worse = (-1, "below", "above") if lower_is_better else (1, "above", "below")
        self.methods = methods.sort_values("mean", ascending=lower_is_better, kind="stable").set_index("method")
        self.mean: dict[str, float] = {str(name): float(mean) for name, mean in self.methods["mean"].items()}
        self.dense, self.metric = dense, metric
        self.has_means = bool(methods["seeds"].max() > 1)
        self.value = "mean" if self.has_means else "result"
        self.pairs: dict[tuple[str, str], Any] = {(str(row.method), str(row.rival)): row for row in tests.itertuples()}
        best = next(iter(self.mean.values()))
        self.best = [name for name, mean in self.mean.items() if abs(best - mean) < EQUAL]
        own = methods[methods["method"].isin(list(ours))].set_index("method")[chosen_by]
        # idxmax takes the first of equal methods; the order of the table does not depend on results.
        self.own = None if own.empty else str((self.sign * own).idxmax())
        self.rivals = [name for name in self.mean if name not in own.index]  # in order

    @property
    def compares(self) -> bool:
        """Return whether the best of this project's own methods is compared with rivals, which needs several seeds."""
        return self.own is not None and bool(self.rivals) and self.has_means

    @property
    def own_holds(self) -> bool:
        assert self.own is not None
        return self._ahead_by(self.own, self.rivals[0]) >= -EQUAL

    def _ahead_by(self, name: str, other: str) -> float:
        return self.sign * (self.mean[name] - self.mean[other])

    def sentences(self) -> list[str]:
        best = self.best[0]
        described = _value(self.methods.loc[best])
        if len(self.mean) == 1:
            return [f"{best} alone was tried: {described}.", *self._against_dense(best)]
        share = "share" if len(self.best) > 1 else "has"
        found = [f"{listed(self.best)} {share} the best {self.value}, {described}."]
        groups: dict[str, list[str]] = {}
        for name in self.mean:
            if name not in self.best:
                title, text = self._standing(best, name)
                groups.setdefault(title, []).append(text)
        found += [f"{title}: {', '.join(groups[title])}." for title in sorted(groups, key=TITLES.index)]
        found += self._winner(best, set(groups) == {TITLES[0]})
        found += self._own_against_rivals()
        return found + self._against_dense(best)

    def _standing(self, best: str, other: str) -> tuple[str, str]:
        """Return the group of a method, and its text there."""
        pair = self.pairs.get((best, other))
        if pair is None:
            return "Not tested against it", f"{other} ({signed(self.mean[other] - self.mean[best])})"
        gap = signed(-shown(self.metric, float(pair.difference)))  # over the seeds that both have
        if not math.isnan(pair.p_holm):
            return TITLES[2 * (pair.seeds == 1) + (pair.p_holm >= SIGNIFICANCE)], f"{other} ({gap})"
        if pair.ahead < pair.seeds:
            text = f"{other} ({gap}, behind in {pair.ahead} of {counted(pair.seeds, 'seed')})"
            return "Behind in the mean but not in every seed", text
        ends = " to ".join(signed(-end) for end in self._ends(pair))
        return "Behind in every seed", f"{other} ({gap}, from {ends})"

    def _ends(self, pair: Any) -> list[float]:
        """Return the differences of the seeds where they are closest and where they are farthest."""
        return sorted((shown(self.metric, float(end)) for end in (pair.least, pair.most)), key=abs)

    def _winner(self, best: str, all_behind: bool) -> list[str]:
        own = self.methods.loc[best]
        if own["seeds"] < SEEDS_FOR_A_CLAIM:
            return []
        if not all_behind or len(self.best) > 1:
            return ["No method wins."]
        overlapping = [name for name in self.mean if name != best and not self._is_apart(own, self.methods.loc[name])]
        if overlapping:
            return [f"Its interval over seeds overlaps with that of {', '.join(overlapping)}, so there is no winner."]
        return [f"{best} wins."]

    def _is_apart(self, best: Any, other: Any) -> bool:
        """Return whether the interval of the other is wholly on the worse side of the best's."""
        low, high = (other, best) if self.sign > 0 else (best, other)
        return bool(float(low["high"]) < float(high["low"]))

    def _own_against_rivals(self) -> list[str]:
        if self.own is None or not self.compares:
            return []
        if self.own_holds:
            rival = self.rivals[0]
            gap = self._ahead_by(self.own, rival)
            level, ahead = f"level with the best rival, {rival}", f"{_gap(gap)} {self.better} the best rival, {rival}"
            where = level if gap < EQUAL else ahead + self._certainty(self.own, rival)
            return [f"The best of this project's own methods, {self.own}, is {where}."]
        rivals = [
            f"{name} by {_gap(gap)}{self._certainty(name, self.own)}"
            for name in self.rivals
            if (gap := self._ahead_by(name, self.own)) > EQUAL
        ]
        return [f"The best of this project's own methods, {self.own}, is {self.worse} {', '.join(rivals)}."]

    def _against_dense(self, best: str) -> list[str]:
        if self.dense.empty:
            return []
        gap = self.sign * (self.mean[best] - float(self.dense["mean"].iloc[0]))
        if abs(gap) < LEVEL_MEANS:
            return [f"The best {self.value} is level with the dense model's."]
        certainty = self._certainty(best, DENSE, below=gap < 0)
        return [
            f"The best {self.value} is {abs(gap):.1f} {self.better if gap > 0 else self.worse} the dense model's{certainty}."
        ]

    def _certainty(self, method: str, rival: str, *, below: bool = False) -> str:
        """Return the evidence that a method is above its rival (or below), in brackets."""
        pair = self.pairs.get((method, rival))
        if pair is None:
            return ""
        if math.isnan(pair.p_holm):
            agreeing = pair.behind if below else pair.ahead
            near, far = map(abs, self._ends(pair))
            ends = f", by {_gap(near)} to {_gap(far)}" * (agreeing == pair.seeds > 1)
            return f" (in {agreeing} of {counted(pair.seeds, 'seed')}{ends})"
        significant = "significantly" if pair.p_holm < SIGNIFICANCE else "not significantly"
        return f" ({significant}{' for this one seed' * (pair.seeds == 1)})"


def _gap(gap: float) -> str:
    return f"{gap:.1f}" if gap >= LEVEL_MEANS else "less than 0.1"


def _value(row: Any) -> str:
    seeds = int(row["seeds"])
    if seeds < 2:
        return f"{row['mean']:z.1f} (one seed)"
    if row["high"] - row["low"] < EQUAL:  # the seeds show no spread, which is not a narrow interval
        return f"{row['mean']:z.1f} (the same in {seeds} seeds)"
    return f"{row['mean']:z.1f} ({row['low']:z.1f} to {row['high']:z.1f}, {seeds} seeds)"


def _ranks(ranks: pd.DataFrame, test: RankTest) -> str:
    listed = ", ".join(f"{name} {rank:.1f}" for name, rank in zip(ranks["method"], ranks["average_rank"], strict=True))
    if test.p is None:
        return f"Average ranks are not tested: {test.reason}." + (f" They are: {listed}." if test.average_ranks else "")
    pairs, seeds = math.comb(len(ranks), 2), counted(test.blocks, "seed")
    known = (
        f"Average ranks over {seeds} and their budgets (1 is best): {listed}. Friedman's test that all methods are alike, with "
        f"seeds as its blocks, has p = {test.p:.2g}. "
    )
    if 2 ** (1 - test.blocks) * pairs >= SIGNIFICANCE:  # the smallest p of Wilcoxon's test, corrected
        return f"{known}Single pairs are not tested: {seeds} are too few for {counted(pairs, 'pair')} of methods."
    behind = ranks.loc[ranks["p_holm"] < SIGNIFICANCE, "method"].tolist()
    return (
        f"{known}By Wilcoxon's test with Holm's correction for all pairs, {', '.join(behind) or 'none'} "
        f"rank{'s' * (len(behind) < 2)} behind {ranks['method'].iloc[0]}."
    )
