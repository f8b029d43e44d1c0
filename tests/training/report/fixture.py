"""A small comparison in the form that ``training compare`` leaves, written from a formula: no training, always the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd

from training.stats.tables import TEST_COLUMNS, seed_by_seed, summarise

METHODS = ("learned", "his", "random")
GAIN = {"learned": 0.02, "his": 0.01, "random": -0.10}
VERDICT = """**learned** has the best mean at both budgets, *retrained*.

| budget | best |
| --- | --- |
| 4 | learned |

<script>document.title = "taken"</script> ![](https://example.org/pixel.png)
"""


def write_comparison(
    folder: Path,
    *,
    methods: tuple[str, ...] = METHODS,
    budgets: tuple[int, ...] = (4, 2),
    seeds: tuple[int, ...] = (0, 1, 2),
    kinds: tuple[str, ...] = ("encoder",),
    layers: int = 2,
    name: str = "fixture",
) -> Path:
    """Write all files of the contract: tables, masks, scores, gates over time, verdict, configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    heads, rng = 4, np.random.default_rng(0)
    sites = [
        {"label": f"{kind}.{layer}", "kind": kind, "layer": layer, "heads": heads, "gates": heads}
        for kind in kinds
        for layer in range(layers)
    ]
    gates = len(sites) * heads
    names = [f"{site['label']}.{head}" for site in sites for head in range(heads)]

    rows, masks, histories = [], [], []
    for seed in seeds:
        cells = [("dense", gates), *((method, budget) for budget in budgets for method in methods)]
        for stage in ("post hoc", "retrained"):
            for method, budget in cells:
                gain = GAIN.get(method, 0.03 * np.cos(len(method))) if method != "dense" else 0.0
                lost = (0.10 if stage == "post hoc" else 0.03) * (1 - budget / gates)
                test = 0.9 + gain * (1 - budget / gates) - lost + rng.normal(0, 0.004)
                trained = stage != "post hoc"
                row = {"seed": seed, "method": method, "stage": stage, "budget": budget, "heads": budget}
                row |= {"select_loss": 0.4, "select_accuracy": test + 0.01, "test_loss": 1 - test, "test_accuracy": test}
                row |= {
                    "test_f1": test - 0.01,
                    "steps": 120 * trained,
                    "seconds": (20 * len(method) + seed / 8) if trained else 0.5,
                }
                rows.append(row | {"peak_memory_mb": 512.5, "experiment": f"{seed}-{method}-{budget}-{stage}"})
        for budget in budgets:
            for method in methods:
                order = rng.permutation(gates) if method == "random" else np.argsort(rng.normal(np.arange(gates), 2.0))
                mask = np.zeros(gates, dtype=int)
                mask[order[-budget:]] = 1
                masks.append({"seed": seed, "method": method, "budget": budget, "mask": mask.tolist()})
                if method.startswith("learned"):
                    for step in range(0, 121, 20):
                        soft = np.where(mask, 1.0, np.clip(1.2 - step / 60 * rng.uniform(0.6, 1.4, gates), 0, 1))
                        values = mask if step >= 100 else soft
                        place = {"seed": seed, "method": method, "budget": budget, "step": step}
                        histories.append(place | dict(zip(names, values, strict=True)))

    comparison = pd.DataFrame(rows)
    comparison.to_csv(folder / "comparison.csv", index=False)
    summarise(comparison, "accuracy").to_csv(folder / "summary.csv", index=False)
    pd.DataFrame(histories).to_csv(folder / "gates_over_time.csv", index=False)
    (folder / "masks.json").write_text(json.dumps(masks))
    (folder / "sites.json").write_text(json.dumps(sites))

    scores = [
        {
            "seed": seed, "gate": gate, "site": gate // heads, "kind": sites[gate // heads]["kind"],
            "layer": sites[gate // heads]["layer"], "head": gate % heads, "his": 0.01 * (gate + 1) * rng.uniform(0.7, 1.3),
            "his_standard_error": 0.001, "entropy": 1 - 0.9 * (gate + 0.5) / gates * rng.uniform(0.8, 1.0), "ranking:his": gate,
        }
        for seed in seeds
        for gate in range(gates)
    ]  # fmt: skip
    pd.DataFrame(scores).to_csv(folder / "scores.csv", index=False)

    pairs = [
        {
            "budget": budget, "method": method, "other": other, "jaccard": 0.2 + 0.6 / (1 + i + j),
            "chance_jaccard": 0.125 * budget / budgets[-1], "kendall": 0.5, "spearman": 0.6,
        }
        for budget in budgets
        for i, method in enumerate(methods)
        for j, other in enumerate(methods)
        if i <= j
    ]  # fmt: skip
    pd.DataFrame(pairs).to_csv(folder / "agreement.csv", index=False)
    differences_of(comparison).to_csv(folder / "statistics.csv", index=False)
    metrics = {
        "main_metric": "accuracy", "heads": gates, "budgets": list(budgets), "seeds": list(seeds), "methods": list(methods),
        "name": name, "command": "python -m training compare --config configs/default.yaml --budgets 4,2",
        "machine": {"platform": "x86_64", "cpu_cores": 2}, "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "code": {"version": "0.1.0"},
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "verdict.md").write_text(VERDICT)
    (folder / "config.yaml").write_text("name: fixture\nseed: 0\nmodel: {budget: 4}\n")
    return folder


def differences_of(comparison: pd.DataFrame, metric: str = "accuracy", *, lower_is_better: bool = False) -> pd.DataFrame:
    """Return ``statistics.csv`` of a comparison without predictions: the differences of its rows, and no tests."""
    rows = []
    for stage, of_stage in comparison.groupby("stage", sort=False):
        dense = of_stage["method"] == "dense"
        for budget, own in of_stage[~dense].groupby("budget", sort=False):
            cells = pd.concat([own, of_stage[dense]]).pivot(index="seed", columns="method", values=f"test_{metric}")
            for method in dict.fromkeys(own["method"]):
                for rival in dict.fromkeys([*own["method"], *of_stage.loc[dense, "method"]]):
                    found = (cells[method] - cells[rival]).dropna().to_numpy()
                    if method != rival and len(found):
                        rows.append(seed_by_seed(stage, budget, (method, rival), found, lower_is_better))
    return pd.DataFrame(rows, columns=TEST_COLUMNS)


def write_samples(folder: Path, **texts: list[str]) -> Path:
    """Write the translations that ``training compare`` leaves, with the given columns in place of the generated ones."""
    rows = range(20)
    systems = {
        f"{method}.{stage}.{budget}": [f"{method} {stage} {budget}: {row}" for row in rows]
        for stage in ("post hoc", "retrained")
        for method, budget in [("dense", 8), *((method, budget) for budget in (4, 2) for method in METHODS)]
    }
    generated = {"source": [f"source {row}" for row in rows], "reference": [f"reference {row}" for row in rows], **systems}
    pd.DataFrame(generated | texts).to_csv(folder / "samples.tsv", index=False, sep="\t")
    metrics = json.loads((folder / "metrics.json").read_text())
    signatures = {"accuracy": "nrefs:1|version:<b>", "chrf": "nrefs:1|nc:6"}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"signatures": signatures}))
    return folder


def write_run(folder: Path) -> Path:
    """Write what a single ``training.fit`` run of two layers leaves, as far as a report reads it: a comparison of one seed and
    budget, its curve, and what is said of the run itself."""
    write_comparison(folder, budgets=(3,), seeds=(7,), name="run")
    (folder / "verdict.md").unlink()
    curve = [
        {
            "seed": 7, "method": method, "stage": "post hoc", "budget": kept, "heads": kept,
            "select_accuracy": 0.9 - 0.1 / kept - 0.01 * index,
        }
        for kept in (6, 4, 2)
        for index, method in enumerate(METHODS)
    ]  # fmt: skip
    pd.DataFrame(curve).to_csv(folder / "curve.csv", index=False)
    metrics = json.loads((folder / "metrics.json").read_text())
    metrics["run"] = {
        "method": "learned", "kept": 3, "selection": {"learned": 0.91, "random+refit": 0.85}, "random": 0.85,
        "dense": {"post hoc": {"test_accuracy": 0.9}},
        "against_dense": {
            "value": 0.895, "low": 0.88, "high": 0.91, "difference": -0.005, "difference_low": -0.02, "difference_high": 0.01,
            "select_lost": False,
        },
        "cost": {
            "pruned_parameters": 900, "dense_parameters": 1000, "hardware": "CPU",
            "latency": [{"batch_size": 1, "ratio": 1.25}, {"batch_size": 16, "ratio": 1.5}],
        },
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "config.yaml").write_text("name: tiny\n")
    return folder
