"""The context of scoring: a model with gates at rest, its training data, and the device and processes that compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.attention.modes import evaluating
from gates.gating.head_gates import HeadGates
from training.data.base import TaskData
from training.runs import progress
from training.tasks import Task

Batch = dict[str, Tensor]


class GatedModule(Protocol):
    """A module that holds a model, the gates on it and its task, such as :class:`training.pruner.module.HeadPruner`."""

    backbone: PreTrainedModel
    gates: HeadGates
    task: Task

    @property
    def device(self) -> torch.device: ...
    def to(self, device: torch.device) -> Any: ...
    def modules(self) -> Iterator[nn.Module]: ...


@contextmanager
def at_rest(module: GatedModule, device: torch.device | None = None) -> Iterator[None]:
    """Open the gates, turn off dropout and move the module during a ``with`` block. Then restore everything.

    Args:
        device: The device to compute on. The module's own by default.
    """
    mode, place = module.gates.mode, module.device
    module.to(device or place)
    module.gates.mode = "open"
    try:
        with evaluating(module):
            yield
    finally:
        module.gates.mode = mode
        module.to(place)


@dataclass(frozen=True)
class ScoringContext:
    """A model to score, with the data to score it on.

    Args:
        data: The data of its task. Under DDP every process scores its share of ``data.score_dataloader()``.
        trainer: The trainer, which decides on the device and the processes.
    """

    module: GatedModule
    data: TaskData
    trainer: pl.Trainer

    @property
    def gates(self) -> HeadGates:
        return self.module.gates

    @property
    def backbone(self) -> PreTrainedModel:
        return self.module.backbone

    @property
    def task(self) -> Task:
        return self.module.task

    @property
    def device(self) -> torch.device:
        return self.trainer.strategy.root_device

    def at_rest(self) -> AbstractContextManager[None]:
        """Put the model at rest on the trainer's device; see :func:`at_rest`."""
        return at_rest(self.module, self.device)

    def batches(self, description: str = "scoring heads", *, bar: bool = True) -> Iterator[Batch]:
        """Iterate over the scoring data of this process, on its device."""
        return self.on_device(self.data.score_dataloader(), description, bar=bar)

    def on_device(self, batches: Iterable[Batch], description: str = "", *, bar: bool = True) -> Iterator[Batch]:
        """Iterate over batches on the device, with or without a bar of progress."""
        for batch in progress.track(batches, description) if bar else batches:
            yield move_data_to_device(batch, self.device)

    def thinned(self, rows: int) -> Iterator[Batch]:
        """Iterate over an even choice of at most ``rows`` scoring examples of all processes together.

        The choice does not depend on the number of processes.
        """
        return self.on_device(self.data.score_dataloader(rows), bar=False)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on the device."""
        reduced = self.trainer.strategy.reduce(values.to(self.device), reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the queries of each site that are not padding, ``[batch, query]``, by the site's name; None if all count."""
        by_kind = self.task.valid_queries(batch)
        return {site.name: by_kind.get(site.kind) for site in self.gates.sites}

    def outputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return per-example losses ``[batch]`` and logits, in the trainer's precision."""
        with self.trainer.precision_plugin.forward_context():
            return self.task.losses(self.backbone, batch)

    def losses(self, batch: Batch) -> Tensor:
        """Return per-example losses ``[batch]``, without autocast: half precision would lose small gradients of gates."""
        return self.task.losses(self.backbone, batch)[0]
