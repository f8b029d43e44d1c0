"""Masks against a known truth, where a model states the heads that it needs: the rows of ``truth.csv``."""

from __future__ import annotations

from typing import Any

import torch

from training.comparison.experiments import Experiments
from training.comparison.tables import Results
from training.config.stages import POST_HOC
from training.truth.compiler import NECESSARY
from training.truth.judgement import Functions, judged

SURVIVES = 0.99
"""Accuracy, as a share of the dense model's, from which a function counts as alive."""


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
