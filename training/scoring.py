"""Score the heads of a model on data: HIS and attention entropy in one pass each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from rich.progress import track
from torch import Tensor

from gates.entropy import AttentionEntropy
from gates.importance import HeadImportance, Importance, head_gradients
from gates.observe import observe_entropy

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from training.module import HeadPruner


class Scores(NamedTuple):
    """Raw scores of every gate, each ``[gates]`` on the CPU."""

    importance: Importance
    entropy: Tensor


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
    device = trainer.strategy.root_device
    before = (gates.mode, pruner.device, [module for module in pruner.modules() if module.training])
    importance = HeadImportance(gates.size).to(device)
    quiet = trainer.training or not trainer.is_global_zero
    pruner.to(device).eval()
    gates.mode = "open"
    try:
        for batch in track(loader, description="scoring heads", disable=quiet, transient=True):
            batch = move_data_to_device(batch, device)
            # Without autocast: gradients of gates are small, and half precision would lose some of them.
            importance.update(head_gradients(gates, lambda batch=batch: task.losses(backbone, batch)[0]))  # type: ignore[misc]
            if also is not None:
                also(batch)
    finally:
        gates.mode = before[0]
        pruner.to(before[1])
        for module in before[2]:
            module.training = True
    return Importance(*(score.cpu() for score in importance.compute()))
