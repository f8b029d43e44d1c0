"""What is logged of a run beside its losses and gates: the phase, the true epoch, learning rates, prices and speed."""

from __future__ import annotations

import time
from typing import Any, get_args

import pytorch_lightning as pl

from training.pruner.module import HeadPruner
from training.pruner.parameters import is_of_gates
from training.pruner.schedule import Phase

PHASES: tuple[str, ...] = get_args(Phase)
"""Phases are logged as numbers, 0, 1 and 2, since logs of numbers take nothing else."""


class CourseLog(pl.Callback):
    """Log where a run is and how fast it goes, at the steps at which losses are logged.

    ``epoch`` is the true one, a fraction: Lightning's own stays at 0, since one loader holds all epochs of a run.
    ``train/phase`` is the number of the phase in :data:`PHASES`, ``train/learning_rate`` that of the backbone and
    ``train/gate_learning_rate`` that of the gates, ``train/price`` what an expected open head costs now, and
    ``train/steps_per_second`` and ``train/examples_per_second`` are of this process since the last entry, without evaluation.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._steps = self._examples = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restart(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since += time.perf_counter() - self._paused

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, HeadPruner)
        if trainer.state.fn == "fit":
            pl_module.log("epoch", epoch_of(pl_module, trainer.global_step), rank_zero_only=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        assert isinstance(pl_module, HeadPruner)
        self._examples += len(next(iter(batch.values())))
        step = trainer.global_step
        # Lightning writes the log where this is so; a value that it does not write would hide the speed of the steps between.
        if step == self._steps or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        seconds = max(time.perf_counter() - self._since, 1e-9)
        speed = {"steps": (step - self._steps) / seconds, "examples": self._examples / seconds}
        logged = course_of(pl_module, step) | {f"train/{name}_per_second": value for name, value in speed.items()}
        pl_module.log_dict(logged, rank_zero_only=True)
        self._restart(trainer)

    def _restart(self, trainer: pl.Trainer) -> None:
        self._since, self._steps, self._examples = time.perf_counter(), trainer.global_step, 0


def epoch_of(pruner: HeadPruner, step: int) -> float:
    """Epochs done after an optimiser step, all phases together."""
    return pruner.epochs * step / max(1, pruner.boundaries[2])


def course_of(pruner: HeadPruner, step: int) -> dict[str, float]:
    """Epoch, phase, learning rates and prices of the step that was the last, which counts from 1."""
    done = step - 1
    logged = {"epoch": epoch_of(pruner, step), "train/phase": float(PHASES.index(pruner.phase(done)))}
    optimizer, factors = pruner.optimizers(), pruner.schedule
    for group in optimizer.param_groups:  # type: ignore[union-attr]
        of_gates = is_of_gates(group)
        factor = factors.gate_rate(done) if of_gates else factors.backbone_rate(done)
        logged.setdefault("train/gate_learning_rate" if of_gates else "train/learning_rate", group["initial_lr"] * factor)
    return logged | {f"train/{name}": price for name, price in pruner.steering.logged_prices(pruner.ramp(done)).items()}
