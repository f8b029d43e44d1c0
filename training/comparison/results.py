"""What a run leaves: its table, masks, scores and pictures, the pruned model, and what is sent to W&B or shown."""

from __future__ import annotations

import shutil
from typing import Any

import pandas as pd
import torch
from pytorch_lightning.loggers import WandbLogger
from rich.console import Console
from rich.table import Table

from gates.export.card import ModelCard
from gates.export.checkpoint import save_pruned
from gates.surgery.masks import save_mask
from training.comparison.run_comparison import Comparison
from training.comparison.scores_table import score_table
from training.data.base import TaskData
from training.plotting import gate_heat_map, mask_agreement, quality_by_budget
from training.pruner.callbacks import GateLog
from training.pruner.module import HeadPruner
from training.pruner.options import mask_found_by
from training.runs.run_directory import RunDirectory
from training.runs.tracking import code_version, machine, versions
from training.tasks import base_model_name

BATCH_SIZES = (1, 8, 32)
"""At which the model card states the export's latency."""


def summarise(
    pruner: HeadPruner, result: Comparison, learned_row: dict[str, Any], *, seed: int, seconds: float, wandb_mode: str
) -> dict[str, Any]:
    """What ``metrics.json`` holds."""
    sites, mask = pruner.gates.sites, pruner.gates.to_heads(pruner.gates.mask)
    dense = [row for row in result.rows if row["method"] == "dense"]
    return {
        "main_metric": pruner.task.main_metric,
        "heads": {
            "total": pruner.gates.heads,
            "kept": learned_row["heads"],
            "by_site": {
                site.label: int(part.sum())
                for site, part in zip(sites, mask.split([site.heads for site in sites]), strict=True)
            },
        },
        "learned": {name: value for name, value in learned_row.items() if name not in ("method", "stage")},
        "dense": {row["stage"]: {k: v for k, v in row.items() if k not in ("method", "stage")} for row in dense},
        "hies_alpha": result.alpha if result.scores else None,
        "seed": seed,
        "train_seconds": round(seconds, 2),
        "wandb_mode": wandb_mode,
        "code": code_version(),
        "machine": machine(),
        "versions": versions(),
    }


def write_results(
    run: RunDirectory,
    pruner: HeadPruner,
    gate_log: GateLog,
    result: Comparison,
    metrics: dict[str, Any],
) -> None:
    """Tables, masks, scores and pictures."""
    gates = pruner.gates
    table, curve = result.table(), pd.DataFrame(result.curve)
    run.write_json("metrics.json", metrics)
    run.join_logs()
    run.write_table("comparison.csv", table)
    run.write_table("curve.csv", curve)
    run.write_table("scores/gates_over_time.csv", gate_log.table(pruner))
    run.write_table("scores/heads.csv", score_table(gates, result))
    for method, mask in result.masks.items():
        save_mask(run.path / "masks" / f"{method}.json", gates.to_heads(mask), gates.sites, method=method)
    main = pruner.task.main_metric
    per_kind = bool(pruner.budget_of(gates.mask).per_kind)
    figures = {
        "gates": gate_heat_map(gates.sites, gates.to_heads(gates.mask).cpu(), title="heads kept"),
        "agreement": mask_agreement(result.masks, gates.kind_index() if per_kind else None),
    }
    if gate_log.values and pruner.boundaries[0] < pruner.boundaries[1]:
        figures["gates_before_retraining"] = gate_heat_map(
            gates.sites, gates.to_heads(last_soft_gates(gate_log, pruner)), title="gates at the end of the prune phase"
        )
    if len(curve):
        figures["quality_by_budget"] = quality_by_budget(curve, table, metric=main)
    for name, figure in figures.items():
        with run.replacing(f"plots/{name}.png") as partial:
            figure.savefig(partial, format="png", dpi=150)


def export(run: RunDirectory, pruner: HeadPruner, data: TaskData, learned_row: dict[str, Any]) -> None:
    """The pruned model, checked on a batch of the test split."""
    gates = pruner.gates
    batch = next(iter(data.test_dataloader()))
    shutil.rmtree(run.export, ignore_errors=True)
    gates.detach()
    try:
        save_pruned(
            pruner.backbone,
            run.export,
            gates.to_heads(gates.mask).cpu(),
            tokenizer=data.tokenizer,
            card=ModelCard(
                base_model=base_model_name(pruner.hparams),
                method=mask_found_by(pruner.hparams),
                metrics={name: learned_row[f"test_{name}"] for name in (*pruner.metrics["test"], "loss")},  # type: ignore[misc]
                versions=versions(),
            ),
            measure=BATCH_SIZES,
            check_batch=pruner.task.model_inputs(pruner.backbone, batch),
        )
    finally:
        gates.attach()


def last_soft_gates(gate_log: GateLog, pruner: HeadPruner) -> torch.Tensor:
    """The gates as last recorded within the prune phase."""
    recorded = [value for step, value in zip(gate_log.steps, gate_log.values, strict=True) if step <= pruner.boundaries[1]]
    return recorded[-1] if recorded else gate_log.values[0]


def send_results(logger: WandbLogger, run: RunDirectory, result: Comparison, metrics: dict[str, Any]) -> None:
    """The comparison as a W&B Table, the pictures as media, the results as the run's summary."""
    logger.log_table("comparison", dataframe=result.table())
    for picture in sorted((run.path / "plots").glob("*.png")):
        logger.log_image(f"plots/{picture.stem}", [str(picture)])
    # Of a metric that was also logged in training, the summary would keep the last such value, and sweeps would choose by it.
    selected = {f"select/{name[7:]}": value for name, value in metrics["learned"].items() if name.startswith("select_")}
    logger.experiment.summary.update({"learned": metrics["learned"], "heads": metrics["heads"], **selected})
    logger.experiment.finish()


def show(
    console: Console, run: RunDirectory, result: Comparison, metrics: dict[str, Any], wandb_logger: Any, main: str
) -> None:
    """The final table and the paths of what was written."""
    heads = metrics["heads"]
    table = Table(title=f"{heads['kept']} of {heads['total']} heads kept")
    short = main if len(main) < 6 else f"{main[:3]}."
    names = {
        "method": "method", "stage": "stage", "heads": "heads", f"select_{main}": f"select {short}",
        f"test_{main}": f"test {short}", "test_loss": "test loss", "steps": "steps", "seconds": "s",
    }  # fmt: skip
    for name, title in names.items():
        table.add_column(title, justify="left" if name in ("method", "stage") else "right", no_wrap=True)
    for row in result.rows:
        style = "bold" if row["method"] == "learned" else None
        table.add_row(
            *(f"{row[n]:.4f}" if isinstance(row[n], float) and n != "seconds" else str(row[n]) for n in names), style=style
        )
    console.print(table)
    for name, path in {
        "comparison": run.path / "comparison.csv",
        "masks": run.path / "masks",
        "pictures": run.path / "plots",
        "pruned model": run.export,
    }.items():
        console.print(f"{name}: {path}")
    if wandb_logger is not None and metrics["wandb_mode"] == "offline":
        console.print(f"W&B (offline): upload with  wandb sync {run.path / 'wandb'}/offline-run-*")
