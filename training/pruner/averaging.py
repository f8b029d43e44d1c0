"""Better weights than the last ones: the average of several checkpoints, or the best on the selection split."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor

from training.pruner.module import HeadPruner
from training.tasks import Task


class AverageWeights(pl.Callback):
    """Replace the backbone's weights by their average over the last checkpoints, at the end of fine-tuning and of the run.

    The average of the last checkpoints of a translator is better than the last one (Vaswani et al. 2017, section 6.1). Only
    checkpoints of one phase go into an average: those of fine-tuning, or those with the final mask.

    Args:
        last: checkpoints to average.
        every: optimiser steps between them.
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
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        step = trainer.global_step
        if (args[2] + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
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
        task: whose main metric says what is better.
        patience: validations without improvement.
    """

    def __init__(self, task: Task, patience: int) -> None:
        mode = "min" if task.lower_is_better else "max"
        super().__init__(f"select/{task.main_metric}", mode=mode, patience=patience, check_on_train_epoch_end=False)
        self.best: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        before = self.best_score.clone()
        super().on_validation_end(trainer, pl_module)
        assert isinstance(pl_module, HeadPruner)
        if trainer.state.fn == "fit" and not torch.equal(before, self.best_score):
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in pl_module.backbone.named_parameters()}

    @torch.no_grad()
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, HeadPruner)
        for name, parameter in pl_module.backbone.named_parameters():
            if name in self.best:
                parameter.copy_(self.best[name])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.best = state.pop("best")
        super().load_state_dict(state)
