"""One training of a run through all its phases, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from training.comparison.adoption import TrainedRun
from training.data.base import TaskData
from training.pruner.averaging import StopEarly
from training.pruner.callbacks import DenseCheckpoint, LastGoodCheckpoint, PhaseCosts, Predictions
from training.pruner.checkpoints import check_identity, read_checkpoint
from training.pruner.course_log import CourseLog
from training.pruner.evaluation import evaluate
from training.pruner.gate_log import GateLog
from training.pruner.module import HeadPruner
from training.runs.run_directory import RunDirectory
from training.setup import Setup, make_trainer


def train(
    setup: Setup,
    run: RunDirectory,
    pruner: HeadPruner,
    data: TaskData,
    loggers: list[Any],
    checkpoint: str | None,
    *,
    identity: str,
) -> TrainedRun:
    """All phases in one go, and the evaluation of what they end with; checkpoints are of the run with this identity."""
    weights, interval = setup.weights, setup.trainer.val_check_interval or data.validation_interval(pruner.epochs)
    gate_log, costs, dense = GateLog(), PhaseCosts(), DenseCheckpoint(run.checkpoint("dense"), checkpoint)
    callbacks: list[pl.Callback] = [gate_log, CourseLog(), costs, dense]
    if weights.patience is not None:
        callbacks.insert(0, StopEarly(pruner.task, weights.patience))
    callbacks.append(LastGoodCheckpoint(run.checkpoint("last"), every=setup.run.save_every))
    trainer = make_trainer(setup, *callbacks, logger=loggers, identity=identity, val_check_interval=interval)
    trainer.fit(pruner, data, ckpt_path=checkpoint, weights_only=True)
    trainer.save_checkpoint(run.checkpoint("final"), weights_only=True)
    finetune, prune, end = pruner.boundaries
    predictions = Predictions()
    metrics = evaluate(make_trainer(setup, predictions), pruner, data)
    return TrainedRun(
        dense=run.checkpoint("dense"),
        costs=costs.costs,
        steps={"finetune": min(finetune, trainer.global_step), "prune": prune - finetune, "retrain": end - prune},
        gates=gate_log.of_pruning(pruner),
        metrics=metrics,
        predictions=predictions,
    )


def check_own_checkpoints(run: RunDirectory, identity: str) -> None:
    """Raises :class:`GateError` for a checkpoint in a run's directory that is another run's, or damaged."""
    for name in ("last", "dense", "final"):
        if (path := run.checkpoint(name)).is_file():
            check_identity(read_checkpoint(path), path, identity, f"the run in {str(run.path)!r}")


def restore(run: RunDirectory, pruner: HeadPruner) -> bool:
    """Bring the module into the final state of a run whose training has ended; False if it has not."""
    final = run.checkpoint("final")
    if not final.is_file():
        return False
    content = read_checkpoint(final)
    pruner.on_load_checkpoint(content)
    pruner.load_state_dict(content["state_dict"])
    return True
