"""Write the files of a comparison: rows, scores, masks, summary, statistics, agreement and the verdict."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor

from gates.attention.sites import site_labels
from gates.gating.budget import Budget
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import effects, interchange
from training.comparison.cache import Experiment
from training.comparison.experiments import PREDICTIONS, Experiments
from training.comparison.methods import Method, file_name
from training.comparison.selection import MaskSelector, Selection
from training.config import Setup
from training.config.comparison import FROM_DENSE, POST_HOC, RETRAINED, is_retrained
from training.config.data import Synthetic
from training.data.base import TaskData
from training.data.synthetic import SyntheticData
from training.data.translation import TranslationData
from training.pruner.module import HeadPruner
from training.report.captions import outcome, warnings
from training.runs import progress
from training.runs.directory import METRICS, RunDirectory
from training.runs.stored import RUN_AGAIN, read_arrays, write_checksums
from training.runs.tracking import code_version, machine, versions
from training.scoring.subject import Batch, ScoringContext
from training.stats.bootstrap import (
    Difference,
    Metric,
    bleu_metric,
    majority_class,
    majority_tag,
    resample_metric,
    resampled_difference,
)
from training.stats.tables import Mask, agreement, compare_methods, rank_methods, summarise
from training.stats.verdict import verdict
from training.tasks import Classification, TokenClassification
from training.tasks.base import Task
from training.tasks.translation import paired_bootstrap, signatures
from training.truth.compiler import NECESSARY
from training.truth.tables import Functions, judged

SAMPLES = 20
"""The number of sentences that are shown with all translations."""


@dataclass(frozen=True)
class Row:
    """Hold one method at one budget and stage, with one seed: a row of ``comparison.csv``.

    Args:
        described: Columns that only some rows have: the bytes of the cache, the share of heads that gates closed.
        metrics: The metrics by split and name, such as ``test_accuracy``.
    """

    seed: int
    method: str
    stage: str
    budget: int
    heads: int
    described: Mapping[str, Any]
    metrics: Mapping[str, float]
    cost: Mapping[str, Any]
    selection: Selection
    experiment: Experiment

    @property
    def predictions(self) -> Path:
        """The file with the predictions."""
        return self.experiment.path / PREDICTIONS

    def as_columns(self) -> dict[str, Any]:
        """Return the row by its columns; the experiment's key comes last."""
        place = {name: getattr(self, name) for name in ("seed", "method", "stage", "budget", "heads")}
        return {**place, **self.described, **self.metrics, **self.cost, "experiment": self.experiment.key}


@dataclass
class Results:
    """Hold the results so far, over all seeds.

    Args:
        rankings: The scores behind masks ``[gates]``, by budget, method and seed.
        scores, gates, prices: The parts of ``scores.csv``, ``gates_over_time.csv`` and ``prices.csv``.
        truth: The rows of ``truth.csv``, if the necessary heads are known.
        carried: The rows of ``interchange.csv``, if the facts behind the answers are known.
        pruner, data: The module and the data of the last seed.
    """

    rows: list[Row] = field(default_factory=list)
    masks: list[dict[str, Any]] = field(default_factory=list)
    rankings: dict[Mask, Tensor] = field(default_factory=dict)
    scores: list[pd.DataFrame] = field(default_factory=list)
    gates: list[pd.DataFrame] = field(default_factory=list)
    prices: list[pd.DataFrame] = field(default_factory=list)
    truth: list[dict[str, Any]] = field(default_factory=list)
    carried: list[dict[str, Any]] = field(default_factory=list)
    budgets: Sequence[Budget] = ()
    pruner: HeadPruner | None = None
    data: TaskData | None = None

    def table(self) -> pd.DataFrame:
        """Return the rows as a table. The key of the experiment is the last column, after columns that only few rows have."""
        table = pd.DataFrame([row.as_columns() for row in self.rows])
        return table[[*table.columns.drop("experiment"), "experiment"]]

    def last_row(self, method: str) -> Row:
        """Return the row of a method's model at the end of a run: retrained if it was retrained, and otherwise post hoc."""
        return next((row for row in self.rows if row.method == method and is_retrained(row.stage)), self.post_hoc(method))

    def post_hoc(self, method: str) -> Row:
        """Return the row of a method without training."""
        return next(row for row in self.rows if (row.method, row.stage) == (method, POST_HOC))


def score_columns(experiments: Experiments, selector: MaskSelector, rankings: Mapping[Mask, Tensor]) -> pd.DataFrame:
    """Return one row per gate of a seed: its place, its raw scores, and its score by each method at the smallest budget."""
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
    columns |= {name: values for name, values in selector.known_scores().items() if np.shape(values) == (gates.size,)}
    for (budget, method, seed), ranking in rankings.items():
        if (budget, seed) == (smallest, experiments.seed):
            columns[f"ranking:{method}"] = ranking.numpy()
    return pd.DataFrame(columns)


def price_rows(experiments: Experiments, selector: MaskSelector) -> pd.DataFrame:
    """Return one row per price that a seed trained with: the gates that it leaves open, in all and in each site."""
    gates = experiments.pruner.gates
    rows = []
    for one in selector.price_runs.values():
        left = [int(part.sum()) for part in one.mask.split(gates.sizes)]
        by_site = dict(zip(site_labels(gates.sites), left, strict=True))
        price = " ".join(f"{kind} {value:g}" for kind, value in one.price.items()) if isinstance(one.price, dict) else one.price
        rows.append({"seed": experiments.seed, "method": one.method, "price": price, "open": sum(left), **by_site})
    return pd.DataFrame(rows)


def sample_translations(results: Results, predictions: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame | None:
    """Return the first sentences of the test split, their references, and the translations by experiments of the first seed.

    Args:
        predictions: ``test_prediction`` of each experiment: the translations of the split, in its order.

    Returns:
        The columns ``source``, ``reference`` and METHOD.STAGE.BUDGET for each system. None for other tasks, and if only a part
        of the split was translated.
    """
    if not isinstance(results.data, TranslationData):
        return None
    pairs, seed = results.data.texts["test"], results.rows[0].seed
    systems = {
        f"{row.method}.{row.stage}.{row.budget}": predictions[row.experiment.key]["test_prediction"]
        for row in results.rows
        if row.seed == seed
    }
    if any(len(texts) != len(pairs.source) for texts in systems.values()):
        return None
    return pd.DataFrame({"source": pairs.source, "reference": pairs.target, **systems}).head(SAMPLES)


def majority_of(results: Results, predictions: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the score of always answering the most frequent class or tag of the test split, by metric.

    The result is empty for other tasks.
    """
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
    """Write all tables that follow from the rows, and remove those of an earlier comparison that this one does not have.

    ``metrics.json`` is written last, before the checksums, so all tables are complete if it exists.

    Args:
        more: Further entries of ``metrics.json``, for a single run.
    """
    pruner = results.pruner
    assert pruner is not None
    main_metric, lower, gates = pruner.task.main_metric, pruner.task.lower_is_better, pruner.gates
    budgets, table, predictions = results.budgets, results.table(), read_predictions(results)
    tokenize = results.data.options.bleu_tokenize if isinstance(results.data, TranslationData) else None
    summary = summarise(table, main_metric)
    tests = compare_methods(table, predictions, metric_of(pruner.task, results.data), lower_is_better=lower)
    quotas = {budget.total: gates.kind_index().tolist() for budget in budgets if budget.per_kind}
    by_kind = {budget.total: budget.pruned(gates.kind_sizes()) for budget in budgets if budget.per_kind}
    within = {budget.total: str(budget.time) for budget in budgets if budget.time is not None}
    ours = [method.name for method in methods if method.is_ours]
    majority = majority_of(results, predictions)
    text = verdict(
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
    metrics = {
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
    }
    run.write_text("verdict.md", text if more is None else with_outcome(text, metrics))
    run.write_json(METRICS, metrics)
    write_checksums(run.path)


def with_outcome(text: str, metrics: Mapping[str, Any]) -> str:
    """Return the verdict of a run with its choice of heads, their quality and warnings as the first paragraphs."""
    sentences = outcome(metrics["run"], metrics["main_metric"])
    known = [sentences[name] for name in ("budget", "choice", "refit", "quality") if name in sentences]
    first = [f"{sentence[0].upper()}{sentence[1:]}.\n" for sentence in (*known, *warnings(metrics))]
    return text.replace("# Verdict\n", "\n".join(["# Verdict\n", *first]), 1)


def against_dense(results: Results, kept: Method) -> dict[str, float | bool]:
    """Return the test metric of the run's final model and its difference to the dense model, with 95 % intervals.

    A retrained model is compared with the retrained dense model, if there is one (``retrained``). ``select_lost`` says whether
    the final model is worse on the selection split, beyond the interval there. The intervals are of a paired bootstrap over
    examples. The result is empty for a dense model.
    """
    assert results.pruner is not None
    if kept.base == "dense":
        return {}
    final = results.last_row(kept.name)
    dense = results.last_row("dense") if is_retrained(final.stage) else results.post_hoc("dense")
    metric = metric_of(results.pruner.task, results.data)
    values, replicates, found = compare_pair(final.predictions, dense.predictions, "test", metric)
    low, high = np.quantile(replicates[:, 0], [0.025, 0.975])
    ends = {"difference": found.difference, "difference_low": found.low, "difference_high": found.high}
    _, _, chosen = compare_pair(final.predictions, dense.predictions, "select", metric)
    ends["select_lost"] = max(map(results.pruner.task.gain, (chosen.low, chosen.high))) < 0
    return {"value": float(values[0]), "low": float(low), "high": float(high), **ends, "retrained": is_retrained(dense.stage)}


def against_second(results: Results, reached: Mapping[str, float]) -> dict[str, Any]:
    """Return the difference of the best choice to the second on the selection split, with its 95 % interval.

    The interval is of a paired bootstrap over examples. The result is empty for less than two choices.

    Args:
        reached: The main metric of each choice that was tried, by method.
    """
    if len(reached) < 2:
        return {}
    assert results.pruner is not None
    task = results.pruner.task
    names = sorted(reached, key=lambda name: -task.gain(reached[name]))  # equals in their order
    first, second = (results.post_hoc(name).predictions for name in names[:2])
    _, _, found = compare_pair(first, second, "select", metric_of(task, results.data))
    return {"second": names[1], "difference": found.difference, "low": found.low, "high": found.high}


def compare_pair(one: Path, other: Path, split: str, metric: Metric) -> tuple[np.ndarray, np.ndarray, Difference]:
    """Return the metric of two models ``[2]``, the same on resampled examples ``[resamples, 2]``, and their difference."""
    arrays = [read_arrays(path, mend=RUN_AGAIN) for path in (one, other)]
    predictions = np.stack([np.asarray(own[f"{split}_prediction"]) for own in arrays])
    values, replicates = resample_metric(predictions, np.asarray(arrays[0][f"{split}_target"]), metric)
    return values, replicates, resampled_difference(float(values[0] - values[1]), replicates[:, 0] - replicates[:, 1])


def metric_of(task: Task, data: TaskData | None) -> Metric:
    """Return the main metric of a task, as the bootstrap takes it."""
    return bleu_metric(data.options.bleu_tokenize) if isinstance(data, TranslationData) else task.main_metric


def read_predictions(results: Results) -> dict[str, dict[str, Any]]:
    """Return the predictions behind each row, by experiment."""
    files = {row.experiment.key: row.predictions for row in results.rows}
    return {key: read_arrays(path, mend=f"delete {str(path.parent)!r} and start again") for key, path in files.items()}


def write_files(run: RunDirectory, results: Results, tables: Mapping[str, pd.DataFrame | None]) -> None:
    """Write the tables, masks and sites. Remove files of an earlier comparison whose table is None here."""
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


# Masks against the heads that carry the facts behind the answers, which interchange interventions on the dense model tell: the
# rows of ``interchange.csv``.

ROWS = 1536
"""The number of examples that are exchanged."""
CARRIES = 0.1
"""The share of the way to the other answer from which a head counts as a carrier."""
LEARNED = 0.6
"""Share of right answers from which a model has learned a fact. Every example has a counterpart of the opposite answer, so a
model without the fact is right half the time. Its effects are ratios of noise."""


def carried_rows(experiments: Experiments, results: Results) -> list[dict[str, Any]]:
    """Return a row for each mask of a seed, with the share of the effects of all heads that the kept heads have.

    There is no row if the data have no facts, the options do not need them, or the dense model has learned none. The columns:
    ``carried`` is the mean share over learned facts; ``at_best`` that of the best mask of this size; ``carriers`` the number of
    heads that carry a fact; ``recall`` the share of them that is kept, of as many as the mask could keep.
    """
    data = experiments.data
    if not isinstance(data, SyntheticData) or not data.options.interchange:
        return []
    of_facts = {fact: torch.tensor(found) for fact, found in facts_of(experiments, data).items()}
    if not of_facts:
        return []
    carriers = torch.stack([found >= CARRIES for found in of_facts.values()]).any(0)
    shares = shares_of(of_facts)
    rows = []
    for entry in results.masks:
        if entry["seed"] != experiments.seed or entry["method"] == "dense":
            continue
        mask = torch.tensor(entry.get("post_hoc_mask", entry["mask"])) > 0
        kept = int(mask.sum())
        most = min(kept, int(carriers.sum()))
        rows.append(
            {
                "seed": experiments.seed, "method": entry["method"], "budget": entry["budget"],
                "carried": float(shares[mask].sum()), "at_best": float(shares.topk(kept).values.sum()),
                "carriers": int(carriers.sum()),
                "recall": float((mask & carriers).sum()) / most if most else 1.0,
            }
        )  # fmt: skip
    return rows


def without_facts(setup: Setup, seeds: Sequence[int], results: Results) -> str | None:
    """Return a notice on seeds without rows although rows were requested; None if all seeds have some."""
    lacking = [str(seed) for seed in seeds if seed not in {row["seed"] for row in results.carried}]
    if not lacking or not isinstance(setup.data, Synthetic) or not setup.data.interchange:
        return None
    return (
        f"interchange.csv has no row of seed {', '.join(lacking)}, because its dense model answers no question right in "
        f"{LEARNED:.0%} of the cases; train longer (--model.finetune)."
    )


def shares_of(effects_of_facts: Mapping[str, Tensor]) -> Tensor:
    """Return the share of each gate in the effects of all, the mean over facts, ``[gates]``. An effect below 0 counts as 0."""
    positive = [found.clamp(min=0) for found in effects_of_facts.values()]
    totals = [found.sum().clamp(min=torch.finfo(found.dtype).tiny) for found in positive]  # no head may carry it
    return torch.stack([found / total for found, total in zip(positive, totals, strict=True)]).mean(0)


def facts_of(experiments: Experiments, data: SyntheticData) -> dict[str, list[float]]:
    """Return the interchange effects of every gate of the dense model, by learned fact. There may be none."""
    determined_by = {"experiment": "interchange", "dense": experiments.dense().key, "rows": ROWS, "learned": LEARNED}
    found = experiments.measure("exchanging heads", determined_by, lambda subject: {"effects": effects_on(subject, data)})
    return dict(found.result["effects"])


def effects_on(subject: ScoringContext, data: SyntheticData) -> dict[str, list[float]]:
    """Return the same effects for a subject."""

    def for_answers(answers: Tensor) -> Callable[[Batch], Tensor]:
        """Return by how much the model prefers the right one of two answers, ``[batch]``."""

        def margin(batch: Batch) -> Tensor:
            logits = subject.task.losses(subject.backbone, batch)[1]
            return (logits[:, 1] - logits[:, 0]) * (2.0 * answers - 1.0)

        return margin

    moved: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    right: dict[str, list[Tensor]] = {}
    with subject.at_rest():
        for fact, original, counterpart in data.counterparts(ROWS):
            batch, other = (move_data_to_device(one, subject.device) for one in (original, counterpart))
            found = interchange(subject.gates, batch, other, for_answers(batch["labels"]))
            moved[fact] = moved.get(fact, 0) + found.moved.sum(0).cpu()
            apart[fact] = apart.get(fact, 0) + found.apart.sum().cpu()
            right.setdefault(fact, []).extend([found.own > 0, found.own < found.apart])
    learned = [fact for fact, answers in right.items() if float(torch.cat(answers).double().mean()) >= LEARNED]
    return {fact: effects(moved[fact], apart[fact]).tolist() for fact in learned}


# The translations that a run leaves: every evaluated system's, and which differences are real.

FOLDER = "translations"
SEARCHES = {"greedy": "test_prediction", "beam": "test_prediction_beam"}
"""Where predictions keep the texts of each search."""


def save_translations(run: RunDirectory, results: Results) -> None:
    """Write the translations of the test split, and ``significance.csv``: the paired bootstrap against the dense model.

    There is one file per system and search, with sources and references. Nothing is written for other tasks. A system that
    translated only a part of the split is left out with a notice.
    """
    if not isinstance(results.data, TranslationData):
        return
    shutil.rmtree(run.path / FOLDER, ignore_errors=True)  # of systems that are no longer compared
    pairs = results.data.texts["test"]
    systems: dict[str, dict[str, list[str]]] = {search: {} for search in SEARCHES}
    for row in results.rows:
        system, texts = f"{row.method}.{row.stage}", texts_of(row.predictions)
        if any(len(lines) < len(pairs.source) for lines in texts.values()):
            translated = min(map(len, texts.values()))
            notice = f"{translated} of {len(pairs.source)} test sentences were translated by {system}; these are not kept"
            Console().print(notice, markup=False, highlight=False, soft_wrap=True)
            continue
        for search, lines in texts.items():
            systems[search][system] = lines
    if not systems["greedy"]:
        return
    (run.path / FOLDER).mkdir(exist_ok=True)
    named = {f"{system}.{search}": lines for search, own in systems.items() for system, lines in own.items()}
    for name, lines in {"source": pairs.source, "reference": pairs.target, **named}.items():
        run.write_text(f"{FOLDER}/{file_name(name)}.txt", "".join(f"{' '.join(line.split())}\n" for line in lines))
    write_significance(run, systems, pairs.target, results.data)


def texts_of(predictions: Path) -> dict[str, list[str]]:
    """Return the translations of the test split of an experiment, by search."""
    arrays = read_arrays(predictions, mend=f"delete {str(predictions.parent)!r} and start again")
    return {search: arrays[name].tolist() for search, name in SEARCHES.items() if name in arrays}


def write_significance(
    run: RunDirectory,
    systems: Mapping[str, Mapping[str, list[str]]],
    reference: list[str],
    data: TranslationData,
    *,
    baseline: str = "dense",
    samples: int = 1000,
) -> None:
    """Write the paired bootstrap of every system against a baseline, retrained if there is such a row and else post hoc."""
    rows = []
    for search, texts in systems.items():
        first = next(
            (name for name in (f"{baseline}.{stage}" for stage in (RETRAINED, FROM_DENSE, POST_HOC)) if name in texts), None
        )
        if first is None or len(texts) < 2:
            continue
        ordered = {first: texts[first], **{name: own for name, own in sorted(texts.items()) if name != first}}
        tested = paired_bootstrap(ordered, reference, samples=samples, tokenize=data.options.bleu_tokenize)
        rows += [{"search": search, "baseline": first, **row} for row in tested]
    if rows:
        run.write_table(f"{FOLDER}/significance.csv", pd.DataFrame(rows))


# Masks against a known truth, where a model states the heads that it needs: the rows of ``truth.csv``.

SURVIVES = 0.99
"""Accuracy, as a share of the dense model's, from which a function counts as alive."""


def necessary_gates(experiments: Experiments) -> Functions:
    """Return the gates that perform each necessary function of a model; empty if the truth is unknown."""
    gates = experiments.pruner.gates
    layers, heads = gates.layer_index().tolist(), [head for size in gates.sizes for head in range(size)]
    gate_of = {place: gate for gate, place in enumerate(zip(layers, heads, strict=True))}
    stated: list[list[list[int]]] = getattr(experiments.pruner.backbone.config, NECESSARY, [])
    return [[gate_of[layer, head] for layer, head in function] for function in stated]


def truth_rows(experiments: Experiments, results: Results) -> list[dict[str, Any]]:
    """Return a row for each mask of a seed except the dense one; none if the truth of the model is unknown."""
    functions, metric = necessary_gates(experiments), f"test_{experiments.pruner.task.main_metric}"
    if not functions:
        return []
    of_seed = [row for row in results.rows if row.seed == experiments.seed and row.stage == POST_HOC]
    quality = {(row.method, row.budget): row.metrics[metric] for row in of_seed}
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
