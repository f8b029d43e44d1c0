"""Callbacks of training: checkpoints, the cost of phases, and the predictions of evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor

from gates.errors import GateError
from gates.files import bring_to_disk
from training.pruner.checkpoints import check_identity, check_whole, read_archive
from training.pruner.module import HeadPruner
from training.pruner.schedule import Phase
from training.runs.cost import Cost, Meter
from training.runs.processes import gathered
from training.tasks import Task


def _ends_step(trainer: pl.Trainer, batch: int) -> bool:
    """Return whether an optimiser step ends with a batch."""
    return (batch + 1) % trainer.accumulate_grad_batches == 0


class EndOfPhase(pl.Callback):
    """Save a checkpoint at the end of a phase and stop there."""

    def __init__(self, path: Path, phase: Phase) -> None:
        self.path, self.phase = path, phase

    def _end(self, pruner: HeadPruner) -> int:
        return pruner.boundaries[0 if self.phase == "finetune" else 1]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        end, step = self._end(pl_module), trainer.global_step
        if step > end:
            raise GateError(
                f"the checkpoint to start from is of step {step}, but fine-tuning ends after {end}; give --ckpt_path one of "
                "fine-tuning, such as dense.ckpt"
            )
        trainer.fit_loop.epoch_loop.max_steps = max(1, end)  # Lightning has no limit of no steps at all
        if step == end:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Save a dense model that alone is trained, perhaps before its time, and with other weights than the last."""
        if pl_module.boundaries[0] == pl_module.boundaries[2]:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if _ends_step(trainer, args[2]) and trainer.global_step == self._end(pl_module):
            trainer.save_checkpoint(self.path)


class Predictions(pl.Callback):
    """Keep predictions and targets of evaluation: classes, numbers, the tags of a sentence, or texts and their references.

    Each of several processes evaluates a part of the examples; all have the whole at the end.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[np.ndarray]] = {}
        self._references: dict[str, dict[int, str]] = {}
        self._texts: dict[str, dict[str, list[str]]] = {}

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._keep("select", pl_module, *args)

    def on_test_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._keep(pl_module.tested, pl_module, *args)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._keep_texts("select", pl_module)

    def on_test_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._keep_texts(pl_module.tested, pl_module)

    def _keep(self, split: str, pruner: HeadPruner, logits: Tensor, batch: dict[str, Any], *args: Any) -> None:
        if "reference" in batch:
            self._references.setdefault(split, {}).update(zip(batch["row"].tolist(), batch["reference"], strict=True))
        else:
            for name, values in zip(("prediction", "target"), pruner.task.predictions(logits, batch), strict=True):
                array = values.cpu().numpy() if isinstance(values, Tensor) else np.array(values)
                self._kept.setdefault(f"{split}_{name}", []).append(array)

    def _keep_texts(self, split: str, pruner: HeadPruner) -> None:
        """Keep the texts of the whole split by each search; the task has put the processes' parts together."""
        if split in self._references:
            self._texts[split] = pruner.outputs[split]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return classes, numbers or tags in the order of evaluation, or texts in that of the split.

        They are called ``select_prediction``, ``select_target`` and so on; texts by beam search ``test_prediction_beam``. Every
        process has to call this.
        """
        classes = {name: _interleaved(_compact(np.concatenate(parts))) for name, parts in self._kept.items()}
        predicted = {
            f"{split}_prediction" + ("" if search == "greedy" else f"_{search}"): np.array(texts)
            for split, outputs in self._texts.items()
            for search, texts in outputs.items()
        }
        true = {}
        for split, own in self._references.items():
            texts = {row: text for part in gathered(own) for row, text in part.items()}
            true[f"{split}_target"] = np.array([texts[row] for row in sorted(texts)])
        return classes | predicted | true


def _compact(values: np.ndarray) -> np.ndarray:
    """Return whole numbers in half of the space; others as they are."""
    return values.astype(np.int32) if np.issubdtype(values.dtype, np.integer) else values


def _interleaved(own: np.ndarray) -> np.ndarray:
    """Return the values of all processes in the order that one alone would have had; the processes take turns."""
    parts = gathered(own)
    whole = np.empty(sum(map(len, parts)), np.result_type(*parts))  # texts of one process may be longer
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


class CostInCheckpoints(pl.Callback):
    """Keep the cost so far in every checkpoint, so that work which is stopped and resumed counts whole.

    Args:
        meter: Returns what measures it. The validation of a run that is watched is no part of the work.
    """

    KEY = "cost"

    def __init__(self, meter: Callable[[], Meter]) -> None:
        self.meter = meter

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.meter().pause(True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.meter().pause(False)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.KEY] = asdict(self.meter().cost)

    @classmethod
    def read(cls, path: Path, identity: str) -> Cost:
        """Read the cost from a checkpoint of the experiment with an identity; it may have none yet.

        Raises:
            GateError: If it is another's, or damaged.
        """
        content = read_archive(path)
        check_identity(content, path, identity, "the experiment that is made there")
        return Cost.of(content.get(cls.KEY, {}))


class LastGoodCheckpoint(pl.Callback):
    """Save ``last.ckpt`` regularly, once the next loss has shown that the weights are still sound.

    Until then it is a pending file next to it. It takes the place of the last one when its checksums are right too. Where a
    step ends with a validation, the checkpoint is saved after it. There is none for the last step: its end is saved by itself.

    Args:
        every: The number of optimiser steps between checkpoints.
    """

    def __init__(self, path: Path, *, every: int) -> None:
        self.path, self.every = path, every
        self.pending = path.with_name(f".{path.name}.pending")
        self.saved = -1

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._drop(trainer)  # of a process that was killed, whose weights were not checked

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self._promote(trainer)  # this batch's loss was finite, or the step would have raised
        step = trainer.global_step
        ends = step in (pl_module.boundaries[2], trainer.max_steps)
        if step % self.every == 0 and step not in (0, self.saved) and not ends:
            self.saved = step
            trainer.save_checkpoint(self.pending)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or trainer.global_step != self.saved:
            return
        if trainer.should_stop:
            self._drop(trainer)
        else:
            trainer.save_checkpoint(self.pending)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._promote(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        self._drop(trainer)

    def _promote(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero and self.pending.is_file():
            try:
                check_whole(self.pending)
            except GateError as error:
                raise GateError(
                    f"the disk of {str(self.path)!r} damaged a checkpoint while it was written, and the one before is kept; "
                    "check the disk, then continue with --existing resume"
                ) from error
            self.pending.replace(self.path)
            bring_to_disk(self.path.parent)

    def _drop(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self.pending.unlink(missing_ok=True)


# Better weights than the last ones: the average of several checkpoints, or the best on the selection split.


class AverageWeights(pl.Callback):
    """Replace the backbone's weights by their average over the last checkpoints, at the end of fine-tuning and of the run.

    The average of the last checkpoints of a translator is better than the last one (Vaswani et al. 2017, section 6.1). Only
    checkpoints of one phase go into an average: those of fine-tuning, or those with the final mask.

    Args:
        last: The number of checkpoints to average.
        every: The number of optimiser steps between them.
    """

    def __init__(self, last: int, every: int) -> None:
        self.last, self.every = last, every
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "sums": self.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count, self.sums = state_dict["count"], dict(state_dict["sums"])

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        if not _ends_step(trainer, args[2]) and not trainer.is_last_batch:
            return
        finetune, prune, end = pl_module.boundaries
        for start, boundary in ((0, finetune), (max(finetune, min(prune, end - 1)), end)):
            before = boundary - step
            if start < step <= boundary and before % self.every == 0 and before // self.every < self.last:
                self._add(pl_module.backbone)
                if before == 0:
                    self._replace(pl_module.backbone)
                return

    def _add(self, backbone: torch.nn.Module) -> None:
        self.count += 1
        for name, parameter in backbone.named_parameters():
            known = self.sums.get(name)
            own = parameter.detach().double()  # in which the mean of equal weights is exactly these
            self.sums[name] = own if known is None else known.to(own.device) + own

    def _replace(self, backbone: torch.nn.Module) -> None:
        for name, parameter in backbone.named_parameters():
            parameter.copy_((self.sums[name] / self.count).to(parameter.dtype))
        self.count, self.sums = 0, {}


class StopEarly(EarlyStopping):
    """End the training of a dense model when the selection split has not improved for some validations, and keep the
    weights that were best there.

    Args:
        patience: The number of validations without improvement.
    """

    def __init__(self, task: Task, patience: int) -> None:
        mode = "min" if task.lower_is_better else "max"
        super().__init__(f"select/{task.main_metric}", mode=mode, patience=patience, check_on_train_epoch_end=False)
        self.best: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        before = self.best_score.clone()
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit" and not torch.equal(before, self.best_score):
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in pl_module.backbone.named_parameters()}

    @torch.no_grad()
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for name, parameter in pl_module.backbone.named_parameters():
            if name in self.best:
                parameter.copy_(self.best[name])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.best = state.pop("best")
        super().load_state_dict(state)
