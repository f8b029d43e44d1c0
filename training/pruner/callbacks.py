"""What happens beside the training loop: logging of gates, the dense checkpoint, the open-head count in the bar."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar
from pytorch_lightning.callbacks.progress.rich_progress import RichProgressBarTheme
from pytorch_lightning.loggers import WandbLogger
from torch import Tensor

from gates.errors import GateError
from gates.sites import KINDS
from training.plotting import figure_image, gate_heat_map
from training.pruner.module import HeadPruner
from training.pruner.schedule import Phase
from training.runs.cost import Cost


def _interval(trainer: pl.Trainer) -> int:
    """Steps between log entries."""
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]


class DenseCheckpoint(pl.Callback):
    """Save the dense model, with its optimiser, at the end of the finetune phase: the start of every comparison.

    Args:
        path: where to.
        resumed_from: checkpoint that the run goes on from; past fine-tuning, the dense checkpoint is itself or beside it.
    """

    def __init__(self, path: Path, resumed_from: str | None = None) -> None:
        self.path = path
        self.resumed_from = None if resumed_from is None else Path(resumed_from)
        self.saved_at: float | None = None

    def seconds_since(self) -> float | None:
        """Wall time since the dense checkpoint was saved, None if an earlier process saved it."""
        return None if self.saved_at is None else round(time.perf_counter() - self.saved_at, 2)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, HeadPruner)
        step, finetune = trainer.global_step, pl_module.boundaries[0]
        if step == finetune == 0:
            trainer.save_checkpoint(self.path)
        elif step >= finetune and trainer.is_global_zero and not self.path.is_file():
            assert self.resumed_from is not None
            source = self.resumed_from if step == finetune else self.resumed_from.with_name("dense.ckpt")
            if not source.is_file():
                raise GateError(
                    f"the checkpoint {str(self.resumed_from)!r} is past fine-tuning (step {step} of {finetune}) and there is no "
                    "dense.ckpt beside it, where the comparison would start; resume from an earlier checkpoint"
                )
            shutil.copyfile(source, self.path)
        if step == finetune:
            self.saved_at = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The end of a run that trained a dense model alone, perhaps before its time."""
        assert isinstance(pl_module, HeadPruner)
        finetune, _, end = pl_module.boundaries
        if finetune == end:  # before its time, or with other weights than the last, such as the best
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        stepped = (args[2] + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step == pl_module.boundaries[0]:
            trainer.save_checkpoint(self.path)
            self.saved_at = time.perf_counter()


class EndOfPhase(pl.Callback):
    """Save a checkpoint at the end of a phase and stop there.

    Args:
        path: where to.
        phase: ``finetune`` or ``prune``.
    """

    def __init__(self, path: Path, phase: Phase) -> None:
        self.path, self.phase = path, phase

    def _end(self, pruner: pl.LightningModule) -> int:
        assert isinstance(pruner, HeadPruner)
        return pruner.boundaries[0 if self.phase == "finetune" else 1]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        end = self._end(pl_module)
        trainer.fit_loop.epoch_loop.max_steps = max(1, end)  # Lightning has no limit of no steps at all
        if trainer.global_step == end:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        stepped = (args[2] + 1) % trainer.accumulate_grad_batches == 0
        if stepped and trainer.global_step == self._end(pl_module):
            trainer.save_checkpoint(self.path)


class Predictions(pl.Callback):
    """Keep what a model predicts in evaluation, and what would have been right: classes, or texts and their references."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}
        self._references: dict[str, dict[int, str]] = {}
        self._texts: dict[str, list[str]] = {}

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._keep("select", *args)

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._keep("test", *args)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep_texts("select", pl_module)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep_texts("test", pl_module)

    def _keep(self, split: str, logits: Tensor, batch: dict[str, Any], *args: Any) -> None:
        if "reference" in batch:
            self._references.setdefault(split, {}).update(zip(batch["row"].tolist(), batch["reference"], strict=True))
        else:
            self._kept.setdefault(f"{split}_prediction", []).append(logits.argmax(-1).cpu())
            self._kept.setdefault(f"{split}_target", []).append(batch["labels"].cpu())

    def _keep_texts(self, split: str, pruner: pl.LightningModule) -> None:
        """What the module said of the whole split, by greedy decoding as its main metric counts it."""
        assert isinstance(pruner, HeadPruner)
        if split in self._references:
            self._texts[split] = pruner.outputs[split]["greedy"]

    def arrays(self) -> dict[str, np.ndarray]:
        """Class numbers in the order of evaluation, or texts in that of the split, as ``select_prediction``,
        ``select_target`` and so on."""
        classes = {name: torch.cat(parts).numpy().astype(np.int32) for name, parts in self._kept.items()}
        predicted = {f"{split}_prediction": np.array(texts) for split, texts in self._texts.items()}
        true = {f"{split}_target": np.array([texts[row] for row in sorted(texts)]) for split, texts in self._references.items()}
        return classes | predicted | true


class CostInCheckpoints(pl.Callback):
    """Keep in every checkpoint what the work has cost so far, so that work which is stopped and goes on counts whole.

    Args:
        so_far: says it.
    """

    KEY = "cost"

    def __init__(self, so_far: Callable[[], Cost]) -> None:
        self.so_far = so_far

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.KEY] = asdict(self.so_far())

    @classmethod
    def read(cls, path: Path) -> Cost:
        """What a checkpoint says; nothing if it says none."""
        return Cost(**torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(cls.KEY, {}))


class LastGoodCheckpoint(pl.Callback):
    """Save ``last.ckpt`` every so many optimiser steps, once the next loss has shown that the weights are still sound.

    Args:
        path: of the checkpoint.
        every: optimiser steps between checkpoints.
    """

    def __init__(self, path: Path, *, every: int) -> None:
        self.path, self.every = path, every
        self.pending = path.with_name(f".{path.name}.pending")
        self.saved = -1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._promote(trainer)  # this batch's loss was finite, or the step would have raised
        step = trainer.global_step
        if step % self.every == 0 and step not in (0, self.saved):
            self.saved = step
            trainer.save_checkpoint(self.pending)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._promote(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero:
            self.pending.unlink(missing_ok=True)

    def _promote(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and self.pending.is_file():
            self.pending.replace(self.path)


class GateLog(pl.Callback):
    """Log expected, hard and target open heads and the multipliers; keep every gate's course for the heat map.

    Args:
        pictures: heat maps that are sent to W&B over the run.
    """

    def __init__(self, pictures: int = 8) -> None:
        self.pictures = pictures
        self.steps: list[int] = []
        self.values: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.values = list(state_dict["steps"]), list(state_dict["values"])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        step = trainer.global_step
        if step % _interval(trainer) == 0 and (not self.steps or self.steps[-1] != step):
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
        kinds = gates.kind_index().cpu()
        logged = {}
        for name, counts in (("heads/open", open_gates), ("heads/expected", expected)):
            logged[name] = float(counts.sum())
            for index, kind in enumerate(KINDS):
                if bool((kinds == index).any()):
                    logged[f"{name}/{kind}"] = float(counts[kinds == index].sum())
            for site, part in zip(gates.sites, counts.split(gates.sizes), strict=True):
                logged[f"{name}/{site.label}"] = float(part.sum())
        if pruner.target is not None:
            target, goals = pruner.target, pruner.goals(step)
            logged["heads/target"] = float(sum(goals))
            logged |= {f"heads/target/{kind}": float(goal) for kind, goal in zip(target.kinds, goals, strict=False)}
            if pruner.has_multipliers:
                for name in ("lambda1", "lambda2"):
                    values_of = getattr(target, name).tolist()
                    logged |= {f"multipliers/{name}/{k}": v for k, v in zip(target.kinds or ["all"], values_of, strict=True)}
        pruner.log_dict(logged, rank_zero_only=True)
        pruner.log("open", float(open_gates.sum()), prog_bar=True, logger=False, rank_zero_only=True)
        every = max(1, pruner.boundaries[2] // _interval(trainer) // max(1, self.pictures))
        if len(self.steps) % every == 0:
            self._send_picture(trainer, pruner, values, step)

    def _send_picture(self, trainer: pl.Trainer, pruner: HeadPruner, values: Tensor, step: int) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                figure = gate_heat_map(pruner.gates.sites, pruner.gates.to_heads(values), title=f"gates at step {step}")
                logger.log_image("gates", [figure_image(figure)], step=step)

    def table(self, pruner: HeadPruner) -> pd.DataFrame:
        """One row per recorded step and one column per gate, such as ``encoder.3.11``."""
        gates = pruner.gates
        names = [f"{site.label}.{i}" for site, size in zip(gates.sites, gates.sizes, strict=True) for i in range(size)]
        values = torch.stack(self.values) if self.values else torch.zeros(0, len(names))
        return pd.DataFrame({"step": self.steps, **{name: values[:, i].numpy() for i, name in enumerate(names)}})


class OpenHeadsBar(RichProgressBar):
    """Lightning's progress bar with the open-head count and without the version number."""

    def __init__(self) -> None:
        super().__init__(theme=RichProgressBarTheme(metrics_format=".3f"))

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
