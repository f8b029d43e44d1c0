"""What a comparison leaves beside its rows: scores, masks, summary, statistics, agreement and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from gates.budget import Budget
from gates.head_gates import HeadGates
from gates.surgery.labels import site_labels
from training.comparison.experiments import Experiments
from training.comparison.methods import Method
from training.comparison.selection import MaskSelector
from training.data.base import TaskData
from training.data.translation import TranslationData
from training.pruner.module import HeadPruner
from training.runs import progress
from training.runs.checksums import write_checksums
from training.runs.run_directory import METRICS, RunDirectory
from training.runs.stored import read_arrays
from training.runs.tracking import code_version, machine, versions
from training.stats.bootstrap import bleu_metric, majority_class, majority_tag
from training.stats.statistics import Mask, agreement, compare_methods, rank_methods, summarise
from training.stats.verdict import verdict
from training.tasks import Classification, TokenClassification
from training.tasks.translation_metrics import signatures

SAMPLES = 20
"""Sentences that are shown in all systems."""


@dataclass
class Results:
    """What is known so far, over all seeds.

    Args:
        rows: of ``comparison.csv``.
        masks: of ``masks.json``.
        rankings: scores behind masks ``[gates]``, by budget, method and seed.
        scores, gates, prices: parts of ``scores.csv``, ``gates_over_time.csv`` and ``prices.csv``.
        truth: rows of ``truth.csv``, where the necessary heads are known.
        carried: rows of ``interchange.csv``, where the facts behind the answers are.
        alphas: weight of HIS, of methods that have it, by budget, method and seed.
        predictions: file with the predictions behind each row, by experiment.
        budgets: The budgets of the model.
        pruner, data: of the last seed.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    masks: list[dict[str, Any]] = field(default_factory=list)
    rankings: dict[Mask, Tensor] = field(default_factory=dict)
    alphas: dict[Mask, float] = field(default_factory=dict)
    scores: list[pd.DataFrame] = field(default_factory=list)
    gates: list[pd.DataFrame] = field(default_factory=list)
    prices: list[pd.DataFrame] = field(default_factory=list)
    truth: list[dict[str, Any]] = field(default_factory=list)
    carried: list[dict[str, Any]] = field(default_factory=list)
    predictions: dict[str, Path] = field(default_factory=dict)
    budgets: Sequence[Budget] = ()
    pruner: HeadPruner | None = None
    data: TaskData | None = None

    @property
    def main_metric(self) -> str:
        assert self.pruner is not None
        return self.pruner.task.main_metric


def score_columns(experiments: Experiments, selector: MaskSelector, rankings: Mapping[Mask, Tensor]) -> pd.DataFrame:
    """One row per gate of a seed: where it is, its raw scores, and what each method ranked by at its smallest budget."""
    smallest = selector.smallest.total
    gates = experiments.pruner.gates
    labels = site_labels(gates.sites)
    columns: dict[str, Any] = {
        "seed": experiments.seed,
        "gate": range(gates.size),
        "site": [label for label, size in zip(labels, gates.sizes, strict=True) for _ in range(size)],
        "kind": [site.kind for site, size in zip(gates.sites, gates.sizes, strict=True) for _ in range(size)],
        "layer": [site.layer for site, size in zip(gates.sites, gates.sizes, strict=True) for _ in range(size)],
        "head": [head for size in gates.sizes for head in range(size)],
    }
    columns |= {name: scores.numpy() for name, scores in selector.known_scores().items() if scores.shape == (gates.size,)}
    for (budget, method, seed), ranking in rankings.items():
        if (budget, seed) == (smallest, experiments.seed):
            columns[f"ranking:{method}"] = ranking.numpy()
    return pd.DataFrame(columns)


def as_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """What is known of every experiment, and last its key; a column that few rows have would come after it."""
    table = pd.DataFrame(rows)
    return table[[*table.columns.drop("experiment"), "experiment"]]


def price_rows(experiments: Experiments, selector: MaskSelector) -> pd.DataFrame:
    """One row per price that a seed trained with: the gates that it leaves open, in all and in each site."""
    gates = experiments.pruner.gates
    rows = []
    for one in selector.priced.values():
        left = [int(part.sum()) for part in one.mask.split(gates.sizes)]
        by_site = dict(zip(site_labels(gates.sites), left, strict=True))
        price = " ".join(f"{kind} {value:g}" for kind, value in one.price.items()) if isinstance(one.price, dict) else one.price
        rows.append({"seed": experiments.seed, "method": one.method, "price": price, "open": sum(left), **by_site})
    return pd.DataFrame(rows)


def sample_translations(results: Results, predictions: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame | None:
    """The first sentences of the test split, their references, and what each experiment of the first seed made of them.

    Args:
        results: with all rows.
        predictions: ``test_prediction``, the translations of the split in its order, of each experiment.

    Returns:
        Columns ``source``, ``reference`` and, as METHOD.STAGE.BUDGET, the systems; None for other tasks, and where only a part
        of the split was translated.
    """
    if not isinstance(results.data, TranslationData):
        return None
    pairs, seed = results.data.texts["test"], results.rows[0]["seed"]
    systems = {
        f"{row['method']}.{row['stage']}.{row['budget']}": predictions[row["experiment"]]["test_prediction"]
        for row in results.rows
        if row["seed"] == seed
    }
    if any(len(texts) != len(pairs.source) for texts in systems.values()):
        return None
    return pd.DataFrame({"source": pairs.source, "reference": pairs.target, **systems}).head(SAMPLES)


def majority_of(results: Results, predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By metric, what always answering the most frequent class or tag of the test split would score; empty for other
    tasks."""
    assert results.pruner is not None
    task = results.pruner.task
    if not isinstance(task, (Classification, TokenClassification)):
        return {}
    targets = next(iter(predictions.values()))["test_target"]
    return majority_class(targets) if isinstance(task, Classification) else majority_tag(targets)


@progress.stage("tables and tests")
def write_tables(
    run: RunDirectory,
    results: Results,
    *,
    name: str,
    methods: Sequence[Method],
    seeds: Sequence[int],
    command: str,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Everything that is computed from the rows; what an earlier comparison left and this one has not goes. ``metrics.json`` is
    written last: where it is, everything is. Then there are checksums of all.

    Args:
        run: to write into.
        results: with all rows.
        name: of the comparison or run.
        methods, seeds: what was compared.
        command: as which it can be started again.
        more: what ``metrics.json`` has beside, of a single run.
    """
    pruner = results.pruner
    assert pruner is not None
    main_metric, lower, gates = pruner.task.main_metric, pruner.task.lower_is_better, pruner.gates
    budgets, table, predictions = results.budgets, as_table(results.rows), read_predictions(results)
    tokenize = results.data.options.bleu_tokenize if isinstance(results.data, TranslationData) else None
    metric = main_metric if tokenize is None else bleu_metric(tokenize)
    summary, tests = summarise(table, main_metric), compare_methods(table, predictions, metric, lower_is_better=lower)
    quotas = {budget.total: gates.kind_index().tolist() for budget in budgets if budget.per_kind}
    by_kind = {budget.total: budget.pruned(gates.kind_sizes()) for budget in budgets if budget.per_kind}
    within = {budget.total: str(budget.time) for budget in budgets if budget.time is not None}
    ours = [method.name for method in methods if method.is_ours]
    majority = majority_of(results, predictions)
    said = verdict(
        summary,
        tests,
        main_metric=main_metric,
        lower_is_better=lower,
        ours=ours,
        ranks=rank_methods(table, main_metric, lower_is_better=lower),
        kinds=by_kind,
        unit=gates.unit,
        within=within,
        majority=majority.get(main_metric),
    )
    tables: dict[str, pd.DataFrame | None] = {"comparison.csv": table, "summary.csv": summary, "statistics.csv": tests}
    tables["agreement.csv"] = agreement(results.masks, results.rankings, quotas=quotas)
    tables["samples.tsv"] = sample_translations(results, predictions)
    write_files(run, results, tables | optional_tables(results))
    run.write_text("verdict.md", said)
    run.write_json(
        METRICS,
        {
            "name": name,
            **described_model(pruner),
            "budgets": sorted((budget.total for budget in budgets), reverse=True),
            "budgets_by_kind": by_kind,
            **({"within": within} if within else {}),
            "seeds": list(seeds),
            "methods": [method.name for method in methods],
            "ours": ours,
            **({} if tokenize is None else {"signatures": signatures(tokenize)}),
            **({"majority": majority} if majority else {}),
            "command": command,
            "machine": machine(),
            "versions": versions(),
            "code": code_version(),
            **(more or {}),
        },
    )
    write_checksums(run.path)


def read_predictions(results: Results) -> dict[str, dict[str, Any]]:
    """Return the predictions behind each row, by experiment.

    Raises:
        GateError: If a file is damaged.
    """
    return {
        key: read_arrays(path, mend=f"delete {str(path.parent)!r} and start again") for key, path in results.predictions.items()
    }


def write_files(run: RunDirectory, results: Results, tables: Mapping[str, pd.DataFrame | None]) -> None:
    """Write the tables, masks and sites; a file of an earlier comparison that has no table now is removed."""
    assert results.pruner is not None
    for file, table in tables.items():
        if table is not None:
            run.write_table(file, table)
        else:
            (run.path / file).unlink(missing_ok=True)
    run.write_records("masks.json", results.masks)
    run.write_records("sites.json", list(described_sites(results.pruner.gates)))


def described_model(pruner: HeadPruner) -> dict[str, Any]:
    """Return the metric, the number of heads and the unit of budgets, for ``metrics.json``."""
    return {
        "main_metric": pruner.task.main_metric,
        "lower_is_better": pruner.task.lower_is_better,
        "heads": pruner.gates.heads,
        "gates": pruner.gates.size,
        "unit": pruner.gates.unit,
    }


def optional_tables(results: Results) -> dict[str, pd.DataFrame | None]:
    """Return the tables that only some comparisons have, by file name; None for a table without rows."""
    return {
        "scores.csv": pd.concat(results.scores, ignore_index=True) if results.scores else None,
        "gates_over_time.csv": pd.concat(results.gates, ignore_index=True) if results.gates else None,
        "prices.csv": pd.concat(results.prices, ignore_index=True) if any(map(len, results.prices)) else None,
        "truth.csv": pd.DataFrame(results.truth) if results.truth else None,
        "interchange.csv": pd.DataFrame(results.carried) if results.carried else None,
    }


def described_sites(gates: HeadGates) -> Iterator[dict[str, Any]]:
    """Yield the label, kind, layer, heads and gates of every attention site, for ``sites.json``."""
    for label, site, size in zip(site_labels(gates.sites), gates.sites, gates.sizes, strict=True):
        yield {"label": label, "kind": site.kind, "layer": site.layer, "heads": site.heads, "gates": size}
