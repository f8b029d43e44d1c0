"""Score the heads of a model on data: HIS and attention entropy in one pass each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from rich.progress import track
from torch import Tensor

from gates.hooks.observe import observe_entropy
from gates.scores.entropy import AttentionEntropy
from gates.scores.importance import HeadImportance, Importance, head_gradients

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from training.pruner.module import HeadPruner


class Scores(NamedTuple):
    """Raw scores of every gate, each ``[gates]`` on the CPU."""

    importance: Importance
    entropy: Tensor


@contextmanager
def ready_to_score(pruner: HeadPruner, trainer: pl.Trainer) -> Iterator[None]:
    """Gates open, dropout off and the model on the trainer's device for the length of a ``with`` block."""
    before = (pruner.gates.mode, pruner.device, [module for module in pruner.modules() if module.training])
    pruner.to(trainer.strategy.root_device).eval()
    pruner.gates.mode = "open"
    try:
        yield
    finally:
        pruner.gates.mode = before[0]
        pruner.to(before[1])
        for module in before[2]:
            module.training = True


def batches_on_device(
    loader: DataLoader[Any], trainer: pl.Trainer, description: str = "scoring heads", *, bar: bool = True
) -> Iterator[dict[str, Tensor]]:
    """The batches of this process, on its device, with a bar outside of training unless none is wanted."""
    quiet = trainer.training or not trainer.is_global_zero or not bar
    for batch in track(loader, description=description, disable=quiet, transient=True):
        yield move_data_to_device(batch, trainer.strategy.root_device)


def score_heads(pruner: HeadPruner, loader: DataLoader[Any], trainer: pl.Trainer) -> Scores:
    """HIS (with standard errors, signed score and Fisher information) and mean normalised entropy.

    Gates are open and dropout is off. Under DDP every process scores its share and all get the whole result.
    """
    task, backbone, sites = pruner.task, pruner.backbone, pruner.gates.sites
    entropy = AttentionEntropy(sites).to(trainer.strategy.root_device)

    def observe(batch: dict[str, Tensor]) -> None:
        with torch.no_grad(), observe_entropy(backbone, sites, entropy, task.valid_queries(batch)):
            task.losses(backbone, batch)

    importance = score_importance(pruner, loader, trainer, also=observe)
    return Scores(importance, pruner.gates.to_gates(entropy.compute()).cpu())


def score_importance(
    pruner: HeadPruner,
    loader: DataLoader[Any],
    trainer: pl.Trainer,
    *,
    also: Callable[[dict[str, Tensor]], None] | None = None,
) -> Importance:
    """HIS alone, each ``[gates]`` on the CPU; ``also`` is called with every batch."""
    gates, task, backbone = pruner.gates, pruner.task, pruner.backbone
    importance = HeadImportance(gates.size).to(trainer.strategy.root_device)
    with ready_to_score(pruner, trainer):
        for batch in batches_on_device(loader, trainer):
            # Without autocast: gradients of gates are small, and half precision would lose some of them.
            importance.update(head_gradients(gates, lambda batch=batch: task.losses(backbone, batch)[0]))  # type: ignore[misc]
            if also is not None:
                also(batch)
    return Importance(*(score.cpu() for score in importance.compute()))
