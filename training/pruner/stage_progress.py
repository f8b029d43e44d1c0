"""Training and evaluation as stages of progress: each phase with its steps, each split with its batches."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from training.pruner.module import HeadPruner
from training.pruner.schedule import Phase
from training.runs.progress import Stage, begin


class StageProgress(pl.Callback):
    """Show the phases finetune, prune and retrain with their optimiser steps, the loss and the heads that are open, and every
    evaluation with its batches."""

    def __init__(self) -> None:
        self._phase: Phase = "finetune"
        self._training: Stage | None = None
        self._evaluation: Stage | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, HeadPruner)
        if trainer.global_step < pl_module.boundaries[2]:
            self._begin_phase(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        if self._training is None:
            return
        step, outputs = trainer.global_step, args[0]
        self._training.reach(step - first_step(pl_module, self._phase), lambda: facts(pl_module, float(outputs["loss"])))
        trains_on = step < pl_module.boundaries[2] and not trainer.should_stop and step != trainer.max_steps
        if phase_of(pl_module) != self._phase and trains_on:
            self._end_phase()
            self._begin_phase(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_phase()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end_evaluation(completed=False)
        self._end_phase(completed=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation = begin("evaluating select", sum(trainer.num_val_batches))

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._batch_evaluated()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluation = begin("evaluating test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._batch_evaluated()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_evaluation()

    def _begin_phase(self, pruner: HeadPruner) -> None:
        self._phase = phase_of(pruner)
        first, last = first_step(pruner, self._phase), getattr(pruner.schedule, LAST_STEP[self._phase])
        self._training = begin(self._phase, last - first, pruner.global_step - first)

    def _end_phase(self, *, completed: bool = True) -> None:
        if self._training is not None:
            self._training.end(completed=completed)
        self._training = None

    def _batch_evaluated(self) -> None:
        assert self._evaluation is not None
        self._evaluation.advance()

    def _end_evaluation(self, *, completed: bool = True) -> None:
        if self._evaluation is not None:
            self._evaluation.end(completed=completed)
        self._evaluation = None


LAST_STEP: dict[Phase, str] = {"finetune": "finetune", "prune": "prune", "retrain": "end"}
"""What a schedule calls the step after which a phase ends."""


def phase_of(pruner: HeadPruner) -> Phase:
    """The present phase; with fixed gates there is none that prunes, and all after fine-tuning is retraining."""
    phase = pruner.phase(pruner.global_step)
    return "retrain" if phase == "prune" and pruner.is_fixed else phase


def first_step(pruner: HeadPruner, phase: Phase) -> int:
    """Optimiser steps before a phase."""
    finetune, prune, _ = pruner.boundaries
    return {"finetune": 0, "prune": finetune, "retrain": finetune if pruner.is_fixed else prune}[phase]


def facts(pruner: HeadPruner, loss: float) -> str:
    """The loss of the last batch and the open heads, with the budget while gates are learned."""
    gates, told = pruner.gates, f"loss {loss:.3g}"
    if gates.mode == "open":
        return told
    is_open = gates.open_heads((gates.values().detach() > 0).float())
    budget = pruner.steering.budget if gates.mode == "stochastic" else None
    return f"{told}, heads {is_open}" + ("" if budget is None else f" -> {goal(pruner)}")


def goal(pruner: HeadPruner) -> int:
    """Heads that the budget leaves open, those of kinds that are not pruned among them."""
    budget, gates = pruner.steering.budget, pruner.gates
    assert budget is not None
    mask = pruner.steering.mask_within(gates.log_alpha.detach(), budget)
    return gates.open_heads(mask)
