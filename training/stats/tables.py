"""The statistics of a comparison: tables over seeds, tests between methods, agreement of masks. Pure functions on tables.

The tests themselves are in :mod:`training.stats.significance` and :mod:`training.stats.bootstrap`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from gates.errors import GateError
from training.stats.bootstrap import RESAMPLES, Metric, resample_metric
from training.stats.numbers import BOUNDS, CACHE, CLOSED
from training.stats.significance import (
    RankTest,
    chance_jaccard,
    friedman,
    holm,
    interval,
    paired_difference,
    rank_correlations,
    wilcoxon,
)
from training.stats.verdict import are_dense, is_dense

TEST_COLUMNS = [
    "stage", "budget", "method", "rival", "seeds", "difference", "ahead", "behind", "least", "most",
    "low", "high", "p", "p_holm",
]  # fmt: skip
"""Columns of ``statistics.csv``."""
COSTS = (
    "steps", "forward_examples", "backward_examples", "selection_forward_examples", "selection_backward_examples", "seconds",
    "peak_memory_mb",
)  # fmt: skip
"""Columns of ``comparison.csv``."""
TIE = 1e-7
"""The largest difference that counts as rounding, far less than one example."""


def summarise(comparison: pd.DataFrame, main_metric: str) -> pd.DataFrame:
    """Return mean, standard deviation and 95 % interval of the test metric over seeds, for each stage, method and budget.

    Further columns are ``select_mean`` and the means of costs, of the KV cache per token, and of :data:`CLOSED`, as far as the
    comparison has them.

    Args:
        comparison: The rows of experiments: ``seed``, ``method``, ``stage``, ``budget``, ``test_METRIC``, costs, and
            ``select_METRIC`` if there is a selection split.
    """
    column = _metric_column(comparison, main_metric)
    rows = []
    for (stage, method, budget), cells in comparison.groupby(["stage", "method", "budget"], sort=False):
        mean, std, low, high, seeds = interval(cells[column], bounds=BOUNDS.get(main_metric))
        averaged = {f"select_{main_metric}": "select_mean"} | {name: name for name in (CACHE, CLOSED, *COSTS)}
        means: dict[Any, Any] = {title: cells[name].mean() for name, title in averaged.items() if name in cells}
        where: dict[Any, Any] = {"stage": stage, "method": method, "budget": budget}
        rows.append({**where, "seeds": seeds, "mean": mean, "std": std, "low": low, "high": high, **means})
    return pd.DataFrame(rows)


def compare_methods(
    comparison: pd.DataFrame,
    predictions: Mapping[str, Mapping[str, Any]],
    metric: Metric,
    *,
    lower_is_better: bool = False,
    resamples: int = RESAMPLES,
) -> pd.DataFrame:
    """Compare methods with their rivals at the same stage and budget, with the tests that the number of seeds allows.

    The dense model is a rival at every budget of its stage. The columns are :data:`TEST_COLUMNS`. ``seeds`` are
    the common ones; in some of them the method is ``ahead`` or ``behind``. ``least`` and ``most`` are differences of a seed.
    Low, high and p are those of :func:`training.stats.significance.paired_difference`. ``p_holm`` is corrected for all pairs
    at the same stage and budget.

    Args:
        comparison: The rows of :func:`summarise`, with the column ``experiment``.
        predictions: The ``test_prediction`` and ``test_target`` ``[examples]`` of each experiment, in the same order.
        lower_is_better: Whether the method with the lower value is ahead, as for perplexities.
    """
    tables = []
    for stage, budget, cells in _rounds(comparison):
        stacked, targets = _stacked(cells, predictions)
        values, replicates = resample_metric(stacked, targets, metric, resamples=resamples)
        rows = []
        for pair, first, second in _pairs(cells):
            found = paired_difference(
                values[first], values[second], replicates[:, first], replicates[:, second], stacked.shape[-1]
            )
            differences = values[first] - values[second]
            rows.append({**seed_by_seed(stage, budget, pair, differences, lower_is_better), **found._asdict()})
        tables.append(_corrected(pd.DataFrame(rows, columns=TEST_COLUMNS)))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=TEST_COLUMNS)


def _rounds(comparison: pd.DataFrame) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """Yield each stage and budget with its experiments and those of the dense model."""
    for stage, of_stage in comparison.groupby("stage", sort=False):
        dense = of_stage[are_dense(of_stage["method"])]
        for budget, own in of_stage[~are_dense(of_stage["method"])].groupby("budget", sort=False):
            yield str(stage), int(str(budget)), pd.concat([own, dense]).drop_duplicates(["method", "seed"])


def _pairs(cells: pd.DataFrame) -> Iterator[tuple[tuple[str, str], list[int], list[int]]]:
    """Yield each pruned method with each other method, and their rows of the same seeds."""
    place = {key: index for index, key in enumerate(zip(cells["method"], cells["seed"], strict=True))}
    methods = list(dict.fromkeys(cells["method"]))
    for method in methods:
        for rival in methods:
            seeds = [seed for name, seed in place if name == method != rival and (rival, seed) in place]
            if seeds and not is_dense(method):
                yield (method, rival), [place[method, seed] for seed in seeds], [place[rival, seed] for seed in seeds]


def seed_by_seed(stage: str, budget: int, pair: tuple[str, str], differences: Any, lower_is_better: bool) -> dict[str, Any]:
    """Describe the differences of a pair of methods, one for each seed, without any test."""
    gains = -differences if lower_is_better else differences
    return {
        "stage": stage, "budget": budget, "method": pair[0], "rival": pair[1], "seeds": len(differences),
        "difference": differences.mean(), "ahead": int((gains > TIE).sum()),
        "behind": int((gains < -TIE).sum()), "least": differences.min(), "most": differences.max(),
    }  # fmt: skip


def _corrected(tests: pd.DataFrame) -> pd.DataFrame:
    """Add ``p_holm``, corrected for the distinct pairs with a test; a pair has two rows, one in each direction."""
    ends = [frozenset(pair) for pair in zip(tests["method"], tests["rival"], strict=True)]
    known = {pair: p for pair, p in zip(ends, tests["p"], strict=True) if not np.isnan(p)}
    corrected = dict(zip(known, holm(list(known.values())), strict=True))
    return tests.assign(p_holm=[corrected.get(pair, np.nan) for pair in ends])


def rank_methods(
    comparison: pd.DataFrame, main_metric: str, *, lower_is_better: bool = False
) -> dict[str, tuple[pd.DataFrame, RankTest]]:
    """Rank the methods of each stage, without the dense model, and test their ranks.

    Friedman's test is over the seeds that have all methods at all budgets. Methods that miss half of the cells (budget and
    seed) or more are left out if at least two others remain. Wilcoxon's test compares the method of best average rank with each
    other one, on the means of a seed over its budgets. Its ``p_holm`` is corrected for all pairs of methods, because the same
    data chose the best one; it is NaN for the best, and if too few seeds differ.

    Returns:
        By stage, the columns method, ``average_rank`` (best first) and ``p_holm``, and Friedman's test.
    """
    column = _metric_column(comparison, main_metric)
    rows = comparison[~are_dense(comparison["method"])]
    if lower_is_better:
        rows = rows.assign(**{column: -rows[column]})
    return {str(stage): _rank(of_stage, column) for stage, of_stage in rows.groupby("stage", sort=False)}


def _rank(rows: pd.DataFrame, column: str) -> tuple[pd.DataFrame, RankTest]:
    table = rows.pivot_table(index=["seed", "budget"], columns="method", values=column, sort=False)
    most = table.notna().mean() > 0.5  # a given mask has one budget, and would remove the others from all methods
    table = (table.loc[:, most] if most.sum() >= 2 else table).dropna()
    budgets = table.groupby(level="seed", sort=False).size()
    table = table[table.index.get_level_values("seed").isin(budgets.index[budgets == budgets.max()])].sort_index()
    methods = list(table.columns)
    blocks = table.to_numpy().reshape(-1, int(budgets.max()) if len(budgets) else 1, len(methods))
    test = friedman(blocks)
    ranks = pd.DataFrame({"method": methods, "average_rank": test.average_ranks or np.nan, "p_holm": np.nan})
    ranks = ranks.sort_values("average_rank", kind="stable", ignore_index=True)
    means = dict(zip(methods, blocks.mean(axis=1).T, strict=True))
    pairs = list(combinations(ranks["method"], 2))
    p = [wilcoxon(means[name], means[other]).p for name, other in pairs]
    corrected = np.where([one is None for one in p], np.nan, holm([1.0 if one is None else one for one in p]))
    of_pair = dict(zip(pairs, corrected, strict=True))
    first = ranks.loc[0, "method"]
    return ranks.assign(p_holm=[of_pair.get((first, name), np.nan) for name in ranks["method"]]), test


Mask = tuple[int, str, int]
"""The budget, method and seed of a mask."""


def agreement(
    masks: Sequence[Mapping[str, Any]],
    rankings: Mapping[Mask, ArrayLike],
    *,
    quotas: Mapping[int, Sequence[int]] | None = None,
) -> pd.DataFrame:
    """Measure the agreement of masks and rankings, between methods and between seeds.

    Each budget and ordered pair of methods has a row. It has ``jaccard`` of the masks and its expectation for random masks of
    the same sizes. Kendall's tau-b and Spearman's rho are of the rankings (NaN without one). Values are means over
    seeds, or over pairs of seeds if ``method == other``.

    Args:
        masks: The mappings with ``seed``, ``method``, ``budget`` and the 0/1 ``mask`` per gate.
        rankings: The scores behind the masks ``[gates]``, higher kept first.
        quotas: The kind of each gate as a number ``[gates]``, by the total of each budget with a quota per kind.
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
    """Return the Jaccard index of two 0/1 masks ``[gates]``, and its expectation for random masks of the same sizes.

    With ``groups`` ``[gates]``, random masks keep the same number in every group.
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
    """Return predictions ``[rows, examples]`` and their common targets ``[examples]``."""
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
