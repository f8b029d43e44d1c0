"""Masks against a known truth, where a model states the heads that it needs: ``truth.csv`` and a table of ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from training.comparison.experiments import Experiments
from training.comparison.tables import Results
from training.config.stages import POST_HOC
from training.truth.compiler import NECESSARY
from training.truth.judgement import Functions, judged

SURVIVES = 0.99
"""Accuracy, as a share of the dense model's, from which a function counts as alive."""
TICK, CROSS = "✓", "✗"


def necessary_gates(experiments: Experiments) -> Functions:
    """For each necessary function of a seed's model the gates that perform it; empty where nothing is known of it."""
    gates = experiments.pruner.gates
    layers, heads = gates.layer_index().tolist(), [head for size in gates.sizes for head in range(size)]
    gate_of = {place: gate for gate, place in enumerate(zip(layers, heads, strict=True))}
    stated: list[list[list[int]]] = getattr(experiments.pruner.backbone.config, NECESSARY, [])
    return [[gate_of[layer, head] for layer, head in function] for function in stated]


def truth_rows(experiments: Experiments, results: Results) -> list[dict[str, Any]]:
    """A row for each mask of a seed but the dense model's; none where nothing is known of the model."""
    functions, metric = necessary_gates(experiments), f"test_{experiments.pruner.task.main_metric}"
    if not functions:
        return []
    of_seed = [row for row in results.rows if row["seed"] == experiments.seed and row["stage"] == POST_HOC]
    quality = {(row["method"], row["budget"]): row[metric] for row in of_seed}
    dense = next((value for (method, _), value in quality.items() if method == "dense"), None)
    rows = []
    for entry in results.masks:
        method, budget = entry["method"], entry["budget"]
        if entry["seed"] != experiments.seed or (method, budget) not in quality or method == "dense":
            continue
        found = judged(torch.tensor(entry.get("post_hoc_mask", entry["mask"])), functions)
        value = quality[method, budget]
        rows.append(
            {
                "seed": experiments.seed, "method": method, "budget": budget, "needed": found.needed, "covered": found.covered,
                "recall": found.recall, "precision": found.precision, "exact": found.exact, metric: value,
                "survives": dense is not None and value >= SURVIVES * dense,
            }
        )  # fmt: skip
    return rows


def ticks(truth: pd.DataFrame) -> pd.DataFrame:
    """What each method found where the budget is the number of necessary functions: one row per program (or a single one), one
    column per method. A tick where it found exactly the necessary heads in all seeds, a cross where in none, otherwise in how
    many."""
    at_needed = _with_program(truth[truth["budget"] == truth["needed"]])
    found = at_needed.groupby(["program", "method"], sort=False)["exact"].agg(["sum", "size"])
    found["cell"] = [_cell(int(exact), int(seeds)) for exact, seeds in zip(found["sum"], found["size"], strict=True)]
    return _wide(found["cell"], at_needed)


def summary_of_truth(truth: pd.DataFrame) -> pd.DataFrame:
    """One row per method over all programs: precision, recall and exact recovery where the budget is the number of necessary
    functions, and how many heads more than that the function needs to survive in the masks of this method.

    Returns:
        ``method``; ``exact``, ``recall`` and ``precision``, means over programs and seeds; ``survives``, share at this budget;
        ``spare``, the mean over those programs and seeds in which the function survives at one of the budgets; ``lost``, the
        share in which it survives at none.
    """
    whole = _with_program(truth)
    rows = []
    for method, of_method in whole.groupby("method", sort=False):
        at_needed = of_method[of_method["budget"] == of_method["needed"]]
        smallest = smallest_budgets(of_method)
        rows.append(
            {
                "method": method, "exact": at_needed["exact"].mean(), "recall": at_needed["recall"].mean(),
                "precision": at_needed["precision"].mean(), "survives": at_needed["survives"].mean(),
                "spare": (smallest["smallest"] - smallest["needed"]).mean(), "lost": smallest["smallest"].isna().mean(),
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def smallest_budgets(truth: pd.DataFrame) -> pd.DataFrame:
    """For each program, method and seed the smallest budget from which on the function survives at every larger one that was
    tried; nan where there is none.

    Returns:
        ``program``, ``method``, ``seed``, ``needed``, ``smallest``.
    """
    rows = []
    for (program, method, seed), tried in _with_program(truth).groupby(["program", "method", "seed"], sort=False):
        falling = tried.sort_values("budget", ascending=False)
        alive = falling[falling["survives"].cumprod().astype(bool)]
        smallest = float(alive["budget"].min()) if len(alive) else float("nan")
        rows.append((program, method, seed, int(tried["needed"].iloc[0]), smallest))
    return pd.DataFrame(rows, columns=["program", "method", "seed", "needed", "smallest"])


def as_markdown(truth: pd.DataFrame) -> str:
    """Ticks and summary as two tables."""
    return f"{_table(ticks(truth).reset_index())}\n\n{_table(summary_of_truth(truth))}\n"


def _cell(exact: int, seeds: int) -> str:
    return TICK if exact == seeds else CROSS if exact == 0 else f"{exact}/{seeds}"


def _with_program(truth: pd.DataFrame) -> pd.DataFrame:
    """A comparison of one program does not name it."""
    return truth if "program" in truth else truth.assign(program="")


def _wide(cells: pd.Series, at_needed: pd.DataFrame) -> pd.DataFrame:
    methods, programs = at_needed["method"].unique(), at_needed["program"].unique()
    return cells.unstack("method").reindex(index=pd.Index(programs, name="program"), columns=methods)


def _table(frame: pd.DataFrame) -> str:
    def text(value: Any) -> str:
        return f"{value:.2f}" if isinstance(value, float) else str(value)

    rows: Sequence[Sequence[Any]] = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(text, row))} |" for row in rows)
