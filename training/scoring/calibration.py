"""The loss of masks on training data that neither scored the heads nor trains anything: what searches for a mask decide by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

if TYPE_CHECKING:
    from training.data.base import TaskData
    from training.pruner.module import HeadPruner

Batch = Mapping[str, Tensor]


class Calibration:
    """Losses and gradients of gate values with a pruner's present weights.

    Each process has a share of the examples, and all get the same numbers, so that they come to the same decisions.

    Args:
        pruner: on the trainer's device, without dropout.
        data: see :meth:`training.data.base.TaskData.calibration_dataloaders`.
        trainer: says on which device, in how many processes and with which precision.
        rows: training examples; one half gives gradients, the other losses.
    """

    def __init__(self, pruner: HeadPruner, data: TaskData, trainer: pl.Trainer, rows: int) -> None:
        self.pruner, self.trainer, self.device = pruner, trainer, trainer.strategy.root_device
        self.proposing, self.deciding = [
            [move_data_to_device(batch, self.device) for batch in loader] for loader in data.calibration_dataloaders(rows)
        ]

    @torch.no_grad()
    def loss(self, values: Tensor, share: float) -> float:
        """Mean loss with gate values ``[gates]`` over a share of the deciding half."""
        batches = self.deciding[:: max(1, round(1 / share))]
        total = torch.stack([self._total_loss(values, batch) for batch in batches]).double().sum()
        examples = torch.tensor(float(sum(len(batch["labels"]) for batch in batches)), dtype=torch.float64, device=self.device)
        return float(self._over_processes(total) / self._over_processes(examples))

    def gradient(self, values: Tensor) -> Tensor:
        """Of the loss with respect to gate values ``[gates]``, up to a factor, on the proposing half."""
        leaf = values.clone().requires_grad_()
        for batch in self.proposing:
            self._total_loss(leaf, batch).backward()
        assert leaf.grad is not None
        return self._over_processes(leaf.grad)

    def _total_loss(self, values: Tensor, batch: Batch) -> Tensor:
        gates, task = self.pruner.gates, self.pruner.task
        with self.trainer.strategy.precision_plugin.forward_context(), gates.use(values):
            return task.losses(self.pruner.backbone, batch)[0].sum()

    def _over_processes(self, total: Tensor) -> Tensor:
        reduced = self.trainer.strategy.reduce(total, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced


@contextmanager
def calibration(pruner: HeadPruner, data: TaskData, trainer: pl.Trainer, rows: int) -> Iterator[Calibration]:
    """A :class:`Calibration` for the length of a ``with`` block: dropout is off and the weights rest; the pruner is left in
    the mode it came in."""
    training = [module for module in pruner.modules() if module.training]
    free = [parameter for parameter in pruner.backbone.parameters() if parameter.requires_grad]
    pruner.to(trainer.strategy.root_device).eval()
    try:
        for parameter in free:
            parameter.requires_grad_(False)
        yield Calibration(pruner, data, trainer, rows)
    finally:
        for parameter in free:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
