"""The statistics of a comparison: tables over seeds, tests between methods, agreement of masks. Pure functions on tables.

The tests themselves are in :mod:`training.stats.significance` and :mod:`training.stats.bootstrap`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from gates.errors import GateError
from training.stats.bootstrap import RESAMPLES, Metric, resample_metric, resampled_difference
from training.stats.numbers import BOUNDS
from training.stats.significance import RankTest, chance_jaccard, friedman, holm, interval, rank_correlations, wilcoxon
from training.stats.verdict import are_dense, is_dense


def summarise(comparison: pd.DataFrame, main_metric: str) -> pd.DataFrame:
    """Mean, standard deviation and 95 % interval (Student's t, within the metric's bounds) over seeds, for each stage, method
    and budget.

    Args:
        comparison: one row per experiment: ``seed``, ``method``, ``stage``, ``budget``, ``test_METRIC``, ``steps``, ``seconds``
            and ``peak_memory_mb``; ``select_METRIC`` where there is a selection split.
        main_metric: such as ``accuracy``.

    Returns:
        Columns stage, method, budget, seeds, mean, std, low, high of the metric on test, ``select_mean`` of that on the
        selection split, and the mean steps, seconds and peak memory; in the order in which they first come.

    Raises:
        GateError: if the metric is not in the table.
    """
    column = _metric_column(comparison, main_metric)
    rows = []
    for (stage, method, budget), cells in comparison.groupby(["stage", "method", "budget"], sort=False):
        mean, std, low, high, seeds = interval(cells[column], bounds=BOUNDS.get(main_metric))
        averaged = {f"select_{main_metric}": "select_mean"} | {name: name for name in ("steps", "seconds", "peak_memory_mb")}
        means: dict[Any, Any] = {title: cells[name].mean() for name, title in averaged.items() if name in cells}
        where: dict[Any, Any] = {"stage": stage, "method": method, "budget": budget}
        rows.append({**where, "seeds": seeds, "mean": mean, "std": std, "low": low, "high": high, **means})
    return pd.DataFrame(rows)


def compare_methods(
    comparison: pd.DataFrame,
    predictions: Mapping[str, Mapping[str, Any]],
    metric: Metric,
    *,
    resamples: int = RESAMPLES,
) -> pd.DataFrame:
    """Paired bootstrap of methods against their rivals at the same stage and budget, over test examples and seeds.

    The dense model, whatever its budget, is a rival at every budget of its stage.

    Args:
        comparison: see :func:`summarise`, with the column ``experiment``.
        predictions: ``test_prediction`` and ``test_target`` ``[examples]`` of each experiment, in the same order of examples.
        metric: see :func:`training.stats.bootstrap.metric_values`.
        resamples: of the bootstrap.

    Returns:
        Columns stage, budget, method, rival, seeds (that both have), difference, low, high, p and ``p_holm``, which is
        corrected for all distinct pairs in this table at the same stage and budget.

    Raises:
        GateError: if an experiment has no predictions, or some were tested on different examples.
    """
    rows: list[dict[str, Any]] = []
    for stage, of_stage in comparison.groupby("stage", sort=False):
        dense = of_stage[are_dense(of_stage["method"])]
        for budget, own in of_stage[~are_dense(of_stage["method"])].groupby("budget", sort=False):
            cells = pd.concat([own, dense]).drop_duplicates(["method", "seed"])
            values, replicates = resample_metric(*_stacked(cells, predictions), metric, resamples=resamples)
            place = {key: index for index, key in enumerate(zip(cells["method"], cells["seed"], strict=True))}
            methods = list(dict.fromkeys(cells["method"]))
            tested: list[dict[str, Any]] = []
            for method in methods:
                if is_dense(method):
                    continue
                for rival in (other for other in methods if other != method):
                    seeds = [seed for name, seed in place if name == method and (rival, seed) in place]
                    if not seeds:
                        continue
                    first, second = [place[method, seed] for seed in seeds], [place[rival, seed] for seed in seeds]
                    found = resampled_difference(values[first], values[second], replicates[:, first], replicates[:, second])
                    row = {"stage": stage, "budget": budget, "method": method, "rival": rival, "seeds": len(seeds)}
                    tested.append({**row, **found._asdict()})
            pairs: dict[frozenset[str], float] = {frozenset((row["method"], row["rival"])): row["p"] for row in tested}
            corrected = dict(zip(pairs, holm(list(pairs.values())), strict=True))
            rows += [{**row, "p_holm": corrected[frozenset((row["method"], row["rival"]))]} for row in tested]
    names = ["stage", "budget", "method", "rival", "seeds", "difference", "low", "high", "p", "p_holm"]
    return pd.DataFrame(rows, columns=names)


def rank_methods(comparison: pd.DataFrame, main_metric: str) -> dict[str, tuple[pd.DataFrame, RankTest]]:
    """At each stage, Friedman's test of the methods, but for the dense model, over the blocks (budget and seed) that all
    have; methods that miss half of the blocks or more are left out where two others do not. Then Wilcoxon's test of the one of
    best average rank against each other.

    Returns:
        By stage: columns method, ``average_rank`` (best first) and ``p_holm`` (of the Wilcoxon test, corrected for their
        number; NaN for the first, and where too few blocks differ), and Friedman's test.
    """
    column = _metric_column(comparison, main_metric)
    rows = comparison[~are_dense(comparison["method"])]
    return {str(stage): _rank(of_stage, column) for stage, of_stage in rows.groupby("stage", sort=False)}


def _rank(rows: pd.DataFrame, column: str) -> tuple[pd.DataFrame, RankTest]:
    """Average ranks and tests of the methods of one stage."""
    table = rows.pivot_table(index=["budget", "seed"], columns="method", values=column, sort=False)
    most = table.notna().mean() > 0.5  # a given mask has one budget, and would take the others from all methods
    table = (table.loc[:, most] if most.sum() >= 2 else table).dropna()
    test = friedman(table.to_numpy())
    ranks = pd.DataFrame({"method": table.columns, "average_rank": test.average_ranks or np.nan, "p_holm": np.nan})
    ranks = ranks.sort_values("average_rank", kind="stable", ignore_index=True)
    p = {
        place: found.p
        for place, method in enumerate(ranks["method"])
        if place > 0 and (found := wilcoxon(table[ranks.loc[0, "method"]], table[method])).p is not None
    }
    ranks.loc[list(p), "p_holm"] = holm(list(p.values()))
    return ranks, test


Mask = tuple[int, str, int]
"""Budget, method and seed."""


def agreement(
    masks: Sequence[Mapping[str, Any]],
    rankings: Mapping[Mask, ArrayLike],
    *,
    quotas: Mapping[int, Sequence[int]] | None = None,
) -> pd.DataFrame:
    """How much masks and rankings have in common, between methods and between seeds.

    Args:
        masks: one mapping per mask with ``seed``, ``method``, ``budget`` and the 0/1 ``mask`` per gate.
        rankings: scores behind the masks ``[gates]``, higher kept first, for each budget, method and seed that has them: a
            method that is trained for every budget has other ones at each.
        quotas: of a budget that has a quota per kind, by its total: the kind of each gate, as numbers ``[gates]``.

    Returns:
        One row per budget and ordered pair: ``jaccard`` of the masks beside its expectation for random masks of the same
        sizes (with quotas, of the same sizes in every kind), Kendall's tau-b and Spearman's rho of the rankings at that budget
        (NaN where a method has none), each the mean over seeds; where ``method == other``, the mean over pairs of seeds.
    """
    by_cell = {
        (row["budget"], row["method"], row["seed"]): np.asarray(row["mask"], dtype=int)
        for row in masks
        if not is_dense(row["method"])
    }
    groups = {budget: np.asarray(kinds, dtype=int) for budget, kinds in (quotas or {}).items()}
    known: dict[frozenset[Mask], tuple[float, ...]] = {}

    def compared(first: Mask, second: Mask) -> tuple[float, ...]:
        pair = frozenset((first, second))
        if pair not in known:
            both = [rankings[mask] for mask in (first, second) if mask in rankings]
            correlations = rank_correlations(*both) if len(both) == 2 else (np.nan, np.nan)
            known[pair] = (*overlap(by_cell[first], by_cell[second], groups.get(first[0])), *correlations)
        return known[pair]

    rows = []
    for budget in dict.fromkeys(budget for budget, _, _ in by_cell):
        of_method: dict[str, list[Any]] = {}
        for _, method, seed in (cell for cell in by_cell if cell[0] == budget):
            of_method.setdefault(method, []).append(seed)
        for method, own in of_method.items():
            for other, theirs in of_method.items():
                pairs = list(combinations(own, 2)) if method == other else [(seed, seed) for seed in own if seed in theirs]
                found = [compared((budget, method, seed), (budget, other, paired)) for seed, paired in pairs]
                means = np.mean(found, axis=0) if found else np.full(4, np.nan)
                names = ("jaccard", "chance_jaccard", "kendall", "spearman")
                rows.append({"budget": budget, "method": method, "other": other, **dict(zip(names, means, strict=True))})
    return pd.DataFrame(rows, columns=["budget", "method", "other", "jaccard", "chance_jaccard", "kendall", "spearman"])


def overlap(mask: Any, other: Any, groups: Any | None = None) -> tuple[float, float]:
    """The Jaccard index of two masks, and its expectation for random ones of the same sizes.

    Args:
        mask, other: 0/1, integers ``[gates]``.
        groups: of each gate as a number or name ``[gates]``, where a budget has a quota for each: the random masks keep as
            many of every group then.
    """
    places = np.zeros(len(mask), dtype=int) if groups is None else np.unique(groups, return_inverse=True)[1]
    kept_a, kept_b, heads = (np.bincount(places, weights).astype(int).tolist() for weights in (mask, other, None))
    shared, either = int((mask & other).sum()), int((mask | other).sum())
    return shared / either if either else 1.0, chance_jaccard(kept_a, kept_b, heads)


def _metric_column(comparison: pd.DataFrame, metric: str) -> str:
    column = f"test_{metric}"
    if column not in comparison:
        known = ", ".join(str(name).removeprefix("test_") for name in comparison.filter(like="test_"))
        raise GateError(f"the comparison has no metric {metric!r}; it has {known or 'none on the test split'}")
    return column


def _stacked(rows: pd.DataFrame, predictions: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    """Predictions ``[rows, examples]`` and their common targets ``[examples]``."""
    found = []
    for key in rows["experiment"]:
        if key not in predictions:
            raise GateError(f"the experiment {key!r} has no predictions on the test split; run the comparison again")
        found.append((np.asarray(predictions[key]["test_prediction"]), np.asarray(predictions[key]["test_target"])))
    targets = found[0][1]
    for key, (_, other) in zip(rows["experiment"], found, strict=True):
        if not np.array_equal(targets, other):
            raise GateError(
                f"the experiment {key!r} was tested on other examples than {rows['experiment'].iloc[0]!r}; use one test split"
            )
    return np.stack([prediction for prediction, _ in found]), targets
