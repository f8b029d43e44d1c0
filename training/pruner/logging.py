"""Logs of the gates, the run and its progress during training."""

from __future__ import annotations

import time
from typing import Any, get_args

import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor

from gates.attention.sites import KINDS, site_labels
from training.plotting import figure_image, gate_heat_map
from training.pruner.module import HeadPruner, is_of_gates
from training.pruner.schedule import Phase
from training.runs.progress import Stage, begin


class GateLog(pl.Callback):
    """Log expected, hard and target open heads; keep the values of every gate over time, with expectation and price.

    Args:
        pictures: The number of heat maps that are sent to W&B over the prune phase; the mask follows it.
        after: The number of steps of the same log that another training made after the start of this one.
    """

    def __init__(self, pictures: int = 8, *, after: int = 0) -> None:
        self.pictures, self.after = pictures, after
        self._sent = 0
        self.steps: list[int] = []
        self.values: list[Tensor] = []
        self.scalars: list[dict[str, float]] = []
        """The expected number of open gates and the prices of one, for each step."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "values": self.values, "scalars": self.scalars}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.values, self.scalars = (list(state_dict[name]) for name in ("steps", "values", "scalars"))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        due = step % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if due and (not self.steps or self.steps[-1] != step):
            self._record(trainer, pl_module, step)

    @torch.no_grad()
    def _record(self, trainer: pl.Trainer, pruner: HeadPruner, step: int) -> None:
        gates = pruner.gates
        values = gates.values().cpu()
        self.steps.append(step)
        self.values.append(values)
        open_gates = (values > 0).float()
        stochastic = gates.mode == "stochastic"
        expected = gates.open_probability().cpu() if stochastic else open_gates
        self.scalars.append({"expected": float(expected.sum())} | pruner.steering.logged_prices(pruner.ramp(step - 1)))
        kinds = gates.kind_index().cpu()
        logged, labels = {}, site_labels(gates.sites)
        for name, counts in (("heads/open", open_gates), ("heads/expected", expected)):
            logged[name] = float(counts.sum())
            for index, kind in enumerate(KINDS):
                if bool((kinds == index).any()):
                    logged[f"{name}/{kind}"] = float(counts[kinds == index].sum())
            for label, part in zip(labels, counts.split(gates.sizes), strict=True):
                logged[f"{name}/{label}"] = float(part.sum())
        logged |= {f"latency/{name}": ms for name, ms in pruner.steering.milliseconds(pruner.ramp(step - 1)).items()}
        budget, goals = pruner.steering.budget, pruner.goals(step - 1)  # of the step that is done
        if budget is not None and goals:
            logged["heads/target"] = float(sum(goals))
            logged |= {f"heads/target/{kind}": goal for kind, goal in zip(budget.per_kind, goals, strict=False)}
        pruner.log_dict(logged, rank_zero_only=True)
        first, last, _ = pruner.boundaries
        due = self._sent + (last - first) // max(1, self.pictures)
        if not pruner.is_fixed and first < step <= last and step >= max(first, due):
            self._sent = step
            self._send_picture(trainer, pruner, values, f"gates at step {step}")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if pl_module.gates.mode == "masked":
            self._send_picture(trainer, pl_module, pl_module.gates.values().detach().cpu(), "heads kept")

    def _send_picture(self, trainer: pl.Trainer, pruner: HeadPruner, values: Tensor, title: str) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                figure = gate_heat_map(pruner.gates.sites, pruner.gates.to_heads(values), title=title)
                logger.log_image("gates", [figure_image(figure)], step=trainer.global_step + self.after)

    def of_pruning(self, pruner: HeadPruner) -> pd.DataFrame:
        """Return the rows of :meth:`table` in the prune phase; a checkpoint may have brought earlier ones."""
        table, (first, last, _) = self.table(pruner), pruner.boundaries
        return table[(table["step"] > first) & (table["step"] <= last)]

    def table(self, pruner: HeadPruner) -> pd.DataFrame:
        """Return one row per recorded step.

        ``expected`` is the number of gates expected to be open. ``price`` is the price of an open one in units of the loss,
        with ``price/KIND`` where several kinds are pruned. Each gate has a column, such as ``encoder.3.11``.
        """
        gates = pruner.gates
        names = [f"{label}.{i}" for label, size in zip(site_labels(gates.sites), gates.sizes, strict=True) for i in range(size)]
        values = torch.stack(self.values) if self.values else torch.zeros(0, len(names))
        course = pd.DataFrame({name: values[:, i].numpy() for i, name in enumerate(names)})
        return pd.concat([pd.DataFrame({"step": self.steps}), pd.DataFrame(self.scalars), course], axis="columns")


PHASES: tuple[str, ...] = get_args(Phase)
"""Phases are logged as numbers, 0, 1 and 2, since logs of numbers take nothing else."""


class PositionLog(pl.Callback):
    """Log the position and the speed of a run, at the steps at which losses are logged.

    ``epoch`` is the true one, a fraction: Lightning's own stays at 0, since one loader holds all epochs of a run.
    ``train/phase`` is the number of the phase in :data:`PHASES`, ``train/learning_rate`` that of the backbone and
    ``train/gate_learning_rate`` that of the gates. ``train/price`` is the price of an expected open head.
    ``train/steps_per_second`` and ``train/examples_per_second`` are of this process since the last entry, without evaluation.

    Args:
        after: As of :class:`GateLog`.
    """

    def __init__(self, *, after: int = 0) -> None:
        self.after = after
        self._since = time.perf_counter()
        self._steps = self._examples = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._restart(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._since += time.perf_counter() - self._paused

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn == "fit":
            pl_module.log_dict(place_of(pl_module, trainer.global_step + self.after), rank_zero_only=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: dict[str, Any], batch_idx: int
    ) -> None:
        self._examples += len(next(iter(batch.values())))
        step = trainer.global_step
        # Lightning writes the log where this is so; a value that it does not write would hide the speed of the steps between.
        if step == self._steps or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        seconds = max(time.perf_counter() - self._since, 1e-9)
        speed = {"steps": (step - self._steps) / seconds, "examples": self._examples / seconds}
        logged = position_of(pl_module, step) | place_of(pl_module, step + self.after)
        logged |= {f"train/{name}_per_second": value for name, value in speed.items()}
        pl_module.log_dict(logged, rank_zero_only=True)
        self._restart(trainer)

    def _restart(self, trainer: pl.Trainer) -> None:
        self._since, self._steps, self._examples = time.perf_counter(), trainer.global_step, 0


def place_of(pruner: HeadPruner, step: int) -> dict[str, float]:
    """Return the epoch of an optimiser step, which counts from 1, and its place in the log, which counts from 0."""
    return {"epoch": epoch_of(pruner, step), "step": step - 1.0}


def epoch_of(pruner: HeadPruner, step: int) -> float:
    """Return the epochs done after an optimiser step, all phases together."""
    return pruner.epochs * step / max(1, pruner.boundaries[2])


def position_of(pruner: HeadPruner, step: int) -> dict[str, float]:
    """Return phase, learning rates and prices of the last step, which counts from 1. Fixed gates are of the last phase."""
    done = step - 1
    logged = {"train/phase": float(PHASES.index("retrain" if pruner.is_fixed else pruner.phase(done)))}
    optimizer, factors = pruner.optimizers(), pruner.schedule
    for group in optimizer.param_groups:  # type: ignore[union-attr]
        of_gates = is_of_gates(group)
        factor = factors.gate_rate(done) if of_gates else factors.backbone_rate(done)
        logged.setdefault("train/gate_learning_rate" if of_gates else "train/learning_rate", group["initial_lr"] * factor)
    return logged | {f"train/{name}": price for name, price in pruner.steering.logged_prices(pruner.ramp(done)).items()}


class StageProgress(pl.Callback):
    """Show the phases finetune, prune and retrain with their optimiser steps, the loss and the open heads, and every evaluation
    with its batches."""

    def __init__(self) -> None:
        self._phase: Phase = "finetune"
        self._training: Stage | None = None
        self._evaluation: Stage | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.global_step < pl_module.boundaries[2]:
            self._begin_phase(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if self._training is None:
            return
        step, outputs = trainer.global_step, args[0]
        self._training.reach(step - first_step(pl_module, self._phase), lambda: facts(pl_module, float(outputs["loss"])))
        trains_on = step < pl_module.boundaries[2] and not trainer.should_stop and step != trainer.max_steps
        if phase_of(pl_module) != self._phase and trains_on:
            self._end_phase()
            self._begin_phase(pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._end_phase()

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._end_evaluation(completed=False)
        self._end_phase(completed=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._evaluation = begin("evaluating select", sum(trainer.num_val_batches))

    def on_test_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._evaluation = begin("evaluating test", sum(trainer.num_test_batches))

    def on_validation_batch_end(self, *args: Any) -> None:
        assert self._evaluation is not None
        self._evaluation.advance()

    def on_validation_end(self, *args: Any) -> None:
        self._end_evaluation()

    on_test_batch_end, on_test_end = on_validation_batch_end, on_validation_end  # type: ignore[assignment]

    def _begin_phase(self, pruner: HeadPruner) -> None:
        self._phase = phase_of(pruner)
        first, last = first_step(pruner, self._phase), pruner.boundaries[PHASES.index(self._phase)]
        self._training = begin(self._phase, last - first, pruner.global_step - first)

    def _end_phase(self, *, completed: bool = True) -> None:
        if self._training is not None:
            self._training.end(completed=completed)
        self._training = None

    def _end_evaluation(self, *, completed: bool = True) -> None:
        if self._evaluation is not None:
            self._evaluation.end(completed=completed)
        self._evaluation = None


def phase_of(pruner: HeadPruner) -> Phase:
    """Return the present phase; with fixed gates there is no prune phase, and all after fine-tuning is retraining."""
    phase = pruner.phase(pruner.global_step)
    return "retrain" if phase == "prune" and pruner.is_fixed else phase


def first_step(pruner: HeadPruner, phase: Phase) -> int:
    """Return the number of optimiser steps before a phase."""
    finetune, prune, _ = pruner.boundaries
    return {"finetune": 0, "prune": finetune, "retrain": finetune if pruner.is_fixed else prune}[phase]


def facts(pruner: HeadPruner, loss: float) -> str:
    """Return the loss of the last batch and the open heads, with the heads that the budget leaves while gates are learned."""
    gates, text = pruner.gates, f"loss {loss:.3g}"
    if gates.mode == "open":
        return text
    text += f", heads {gates.open_heads((gates.values().detach() > 0).float())}"
    budget = pruner.steering.budget if gates.mode == "stochastic" else None
    if budget is None:
        return text
    return f"{text} -> {gates.open_heads(pruner.steering.mask_within(gates.log_alpha.detach(), budget))}"
