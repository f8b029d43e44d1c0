"""What is scored: a model with gates at rest, its training data, and the device and processes that compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    """Gates open, dropout off and the module on a device for the length of a ``with`` block; then everything as before, module
    by module.

    Args:
        module: in whatever state.
        device: to compute on; the module's own by default.
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
    """A model to be scored, with the data to score it on.

    Args:
        module: with the weights to be scored.
        data: of its task; scores come from ``data.score_dataloader()``. Under DDP every process has its share.
        trainer: says on which device and in how many processes.
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

    def at_rest(self) -> Any:
        """The state in which it is scored, for the length of a ``with`` block; see :func:`at_rest`."""
        return at_rest(self.module, self.device)

    def batches(self, description: str = "scoring heads", *, bar: bool = True) -> Iterator[Batch]:
        """The scoring data of this process, on its device; a stage of progress unless none is wanted."""
        return self.on_device(self.data.score_dataloader(), description, bar=bar)

    def on_device(self, batches: Iterable[Batch], description: str, *, bar: bool = True) -> Iterator[Batch]:
        """Batches of this process, on its device."""
        for batch in progress.track(batches, description) if bar else batches:
            yield move_data_to_device(batch, self.device)

    def thinned(self, rows: int) -> Iterator[Batch]:
        """The scoring data of this process, thinned out evenly over all lengths so that all processes together have at most so
        many rows: the same ones however many processes there are."""
        places = self.data.score_places()
        step, first = -(-places.stop // rows), 0
        for batch in self.batches(bar=False):
            own = torch.tensor(places[first : first + len(batch["labels"])])
            first += len(own)
            chosen = (own % step == 0).nonzero().flatten().to(self.device)
            if len(chosen):
                yield {name: tensor[chosen] for name, tensor in batch.items()}

    def summed(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, on its device; the tensor itself where there is one process."""
        reduced = self.trainer.strategy.reduce(values.to(self.device), reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return the queries of each site that are not padding, ``[batch, query]``, by the site's name; None if all count.

        The batches of a task hold text alone, or pictures without a mask, so that one mask is that of all sites of a kind.
        """
        by_kind = self.task.valid_queries(batch)
        return {site.name: by_kind.get(site.kind) for site in self.gates.sites}

    def losses(self, batch: Batch) -> Tensor:
        """Per-example losses ``[batch]``. Without autocast: gradients of gates are small, and half precision would lose some
        of them."""
        return self.task.losses(self.backbone, batch)[0]
