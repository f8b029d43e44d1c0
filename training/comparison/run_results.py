"""What a single run leaves beside the tables: the pruned model, mask files, pictures, and the final table."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

from gates.export.card import ModelCard, update_results
from gates.export.checkpoint import save_pruned
from gates.surgery.labels import site_labels
from gates.surgery.masks import save_mask
from gates.surgery.remove import why_not_removable
from training.comparison.in_time import told_of_latency
from training.comparison.methods import Method, file_name
from training.comparison.tables import Results
from training.config.data_base import MORE
from training.config.stages import POST_HOC, RETRAINED, STAGES
from training.data.base import TaskData
from training.plotting import gate_heat_map, mask_agreement, quality_by_budget
from training.pruner.module import HeadPruner
from training.runs import progress
from training.runs.run_directory import RunDirectory
from training.runs.tracking import versions
from training.stats.decided import ENOUGH, HINT
from training.stats.numbers import CACHE, shown, unit
from training.stats.verdict import is_dense, nothing_learned
from training.tasks import base_model_name

SHORT = {"perplexity": "ppl."}
"""Metrics in headings that are not simply cut short."""
BATCH_SIZES = (1, 8, 32)
"""At which the model card states the export's latency."""


@progress.stage("exporting, reloading and checking the pruned model")
def export(run: RunDirectory, pruner: HeadPruner, data: TaskData, metrics: dict[str, float]) -> None:
    """The pruned model, checked on a batch of the test split. Heads that can be gated but not removed are zero in it.

    Args:
        run: to write into.
        pruner: in its final state.
        data: of the run.
        metrics: of the final model, as ``test_accuracy`` and so on.
    """
    gates, options = pruner.gates, pruner.options
    batch = next(iter(data.test_dataloader()))
    shutil.rmtree(run.export, ignore_errors=True)
    gates.detach()
    try:
        save_pruned(
            pruner.backbone,
            run.export,
            gates.to_heads(gates.mask).cpu(),
            form="masked" if why_not_removable(gates.sites) else "pruned",
            tokenizer=data.processor,
            card=ModelCard(
                base_model=base_model_name(options),
                method=options.mask_found_by,
                metrics=metrics_on_test(metrics),
                **source_of(data),
                versions=versions(),
            ),
            measure=BATCH_SIZES,
            check_batch=pruner.task.model_inputs(pruner.backbone, batch),
        )
    finally:
        gates.attach()


def source_of(data: TaskData) -> dict[str, Any]:
    """What a model card says of the data: the hub name of a data set and its configuration, or what kind of data they are; of a
    local folder the last part; and what the metrics are to others."""
    name, subset = getattr(data.options, "dataset", None), getattr(data.options, "subset", None)
    kind = type(data.options).__name__
    stated = Path(name).name if name and Path(name).exists() else name or kind
    more = [name.removeprefix(MORE) for name in data.more_tests]
    further = {"more_splits": more} if more else {}
    return {"dataset": stated, "subset": subset or "", "metric_types": data.task.metric_types(), **further}


def complete_card(run: RunDirectory, results: Results, own: Method) -> None:
    """Put the dense model's results into the export's model card, once the comparison has them: after the same training where
    it was trained on too, and otherwise as it was before pruning."""
    rows = {(row["method"], row["stage"]): row for row in results.rows}
    dense, pruned = rows.get(("dense", RETRAINED), rows.get(("dense", POST_HOC))), rows.get((own.name, RETRAINED))
    if dense is not None and pruned is not None:
        update_results(run.export / "README.md", metrics_on_test(pruned), metrics_on_test(dense))


def metrics_on_test(row: dict[str, Any]) -> dict[str, float]:
    """The results on the test split in a row of the comparison, by the name of the metric; the loss comes last."""
    found = {name.removeprefix("test_"): value for name, value in row.items() if name.startswith("test_")}
    return {name: found[name] for name in sorted(found, key=lambda name: name == "loss")}


def describe_run(
    results: Results, own: Method, mask: torch.Tensor, learned: Mapping[str, Any], *, seconds: float, wandb_mode: str
) -> dict[str, Any]:
    """What ``metrics.json`` says of the run itself.

    Args:
        results: of its comparison.
        own: the run's method.
        mask: that it ended with, ``[gates]``.
        learned: what its gates have learned; see :meth:`training.pruner.steering.Steering.learned`.
        seconds: of its training.
        wandb_mode: how it was logged.
    """
    assert results.pruner is not None
    gates = results.pruner.gates
    kept = gates.to_heads(mask).split([site.heads for site in gates.sites])

    def rows_of(method: str) -> dict[str, dict[str, Any]]:
        left_out = ("seed", "method", "experiment")
        own_rows = [row for row in results.rows if row["method"] == method]
        return {row["stage"]: {name: value for name, value in row.items() if name not in left_out} for row in own_rows}

    stage = POST_HOC if own.base == "dense" else RETRAINED
    return {
        "method": own.name,
        "gates": {name: learned[name] for name in ("closed", "closed_by_gates", "price")} if own.is_learned else {},
        "kept": gates.open_heads(mask),
        "data": source_of(results.data) if results.data is not None else {},
        "by_site": {label: int(part.sum()) for label, part in zip(site_labels(gates.sites), kept, strict=True)},
        "result": rows_of(own.name)[stage],
        "dense": rows_of("dense"),
        "hies_alpha": next(iter(results.alphas.values()), None),
        "train_seconds": round(seconds, 2),
        "wandb_mode": wandb_mode,
    }


@progress.stage("drawing masks and gates")
def write_run(run: RunDirectory, results: Results, own: Method, curve: Sequence[dict[str, Any]]) -> None:
    """The curve, a mask file for each method, and pictures; what an earlier comparison left and this one has not goes."""
    pruner = results.pruner
    assert pruner is not None
    complete_card(run, results, own)
    gates, table = pruner.gates, pd.DataFrame(curve)
    for folder in ("masks", "plots"):
        shutil.rmtree(run.path / folder, ignore_errors=True)
        (run.path / folder).mkdir()
    if len(table):
        run.write_table("curve.csv", table)
    else:
        (run.path / "curve.csv").unlink(missing_ok=True)
    masks = {str(entry["method"]): torch.tensor(entry["mask"]).float() for entry in results.masks}
    for method, mask in masks.items():
        save_mask(run.path / "masks" / f"{file_name(method)}.json", gates.to_heads(mask), gates.sites, method=method)
    per_kind = bool(pruner.steering.budget_of(masks[own.name]).per_kind)
    figures = {
        "gates": gate_heat_map(gates.sites, gates.to_heads(masks[own.name]), title="heads kept"),
        "agreement": mask_agreement(
            {method: mask for method, mask in masks.items() if method != "dense" or method == own.name},
            gates.kind_index() if per_kind else None,
        ),
    }
    courses = [course for course in results.gates if len(course) and course["method"].iloc[0] == own.name]
    if courses:
        last = torch.tensor(courses[0].iloc[-1, -gates.size :].to_numpy(float))  # the gates are the last columns
        figures["gates_before_retraining"] = gate_heat_map(
            gates.sites, gates.to_heads(last), title="gates at the end of the prune phase"
        )
    if len(table):
        figures["quality_by_budget"] = quality_by_budget(
            table, pd.DataFrame(results.rows), metric=pruner.task.main_metric, lower_is_better=pruner.task.lower_is_better
        )
    for name, figure in figures.items():
        with run.replacing(f"plots/{name}.png") as partial:
            figure.savefig(partial, format="png", dpi=150)


def show_run(console: Console, run: RunDirectory, results: Results, described: dict[str, Any], own: Method) -> None:
    """The final table and the paths of what was written."""
    assert results.pruner is not None
    main = results.pruner.task.main_metric
    table = Table(title=f"{described['kept']} of {results.pruner.gates.heads} heads kept")
    last = main.rpartition("_")[2]
    short = SHORT.get(last, last if len(last) < 6 else f"{last[:3]}.")
    names = {
        "method": "method", "stage": "stage", "heads": "heads", f"select_{main}": f"select {short}",
        f"test_{main}": f"test {short}", "test_loss": "test loss", CACHE: "KV bytes", "steps": "steps", "seconds": "s",
    }  # fmt: skip
    names = {name: title for name, title in names.items() if name != CACHE or CACHE in results.rows[0]}
    for name, title in names.items():
        table.add_column(title, justify="left" if name in ("method", "stage") else "right", no_wrap=True)
    for row in sorted(results.rows, key=lambda row: STAGES.index(row["stage"])):
        style = "bold" if row["method"] == own.name else None
        table.add_row(
            *(f"{row[n]:.4f}" if isinstance(row[n], float) and n != "seconds" else str(row[n]) for n in names), style=style
        )
    majority = run.read_json("metrics.json").get("majority", {})
    if main in majority:
        scored = {"method": "majority class"} | {f"test_{name}": f"{value:.4f}" for name, value in majority.items()}
        table.add_row(*(scored.get(name, "") for name in names))
    console.print(table)
    if results.data is not None and (more := [f"{split}_{main}" for split in results.data.more_tests]):
        console.print(f"on further test data: {', '.join(more)} in comparison.csv", soft_wrap=True, highlight=False)
    if "latency" in described:
        console.print(told_of_latency(described["latency"]), soft_wrap=True, highlight=False)
    if told := said_of_gates(described["gates"], "a millisecond" if "latency" in described else "an open one"):
        console.print(told, soft_wrap=True, highlight=False)
    dense = pd.Series([row[f"test_{main}"] for row in results.rows if is_dense(row["method"])], dtype=float)
    if warning := nothing_learned(shown(main, dense), shown(main, majority[main]) if main in majority else None, unit(main)):
        console.print(f"warning: {warning}", soft_wrap=True, highlight=False)
    for name, path in {
        "comparison": run.path / "comparison.csv",
        "verdict": run.path / "verdict.md",
        "masks": run.path / "masks",
        "pictures": run.path / "plots",
        "pruned model": run.export,
    }.items():
        console.print(f"{name}: {path}")
    if reason := why_not_removable(results.pruner.gates.sites):
        console.print(
            f"the heads given up are zeros in the pruned model, and not gone: {reason}", soft_wrap=True, highlight=False
        )
    if described["wandb_mode"] == "offline":
        console.print(f"W&B (offline): upload with  wandb sync {run.path / 'wandb'}/offline-run-*")


def said_of_gates(learned: Mapping[str, Any], priced: str = "an open one") -> str:
    """In one line, how far the gates decided themselves and what one was worth at the end; empty where nothing was learned.

    Args:
        learned: what ``metrics.json`` says of them.
        priced: what they paid for.
    """
    if not learned or not learned["price"]:  # a price that was given, and the exact top K, leave no gate to a budget
        return ""
    text = f"of {learned['closed']} gates that are closed, {learned['closed_by_gates']} had closed by themselves"
    few = learned["closed_by_gates"] < ENOUGH * learned["closed"]
    rest = f", and the rest was closed by their rank; {HINT}" if few else ""
    return f"{text}{rest}; price of {priced} at the end: {', '.join(f'{each:.3g}' for each in learned['price'])}"
