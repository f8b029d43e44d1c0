"""Score the heads of a dense model on data: HIS and attention entropy in one pass each."""

from __future__ import annotations

from typing import NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader

from gates.entropy import AttentionEntropy, observe_entropy
from gates.importance import HeadImportance, Importance, head_gradients
from training.module import HeadPruner


class Scores(NamedTuple):
    """Raw scores of every head, each ``[heads]`` on the CPU."""

    importance: Importance
    entropy: Tensor


def score_heads(pruner: HeadPruner, loader: DataLoader[dict[str, Tensor]], trainer: pl.Trainer) -> Scores:
    """HIS (with standard errors, signed score and Fisher information) and mean normalised entropy.

    Gates are open and dropout is off. Under DDP every process scores its share and all get the whole result.
    """
    gates, task, backbone = pruner.gates, pruner.task, pruner.backbone
    device = trainer.strategy.root_device
    before = (gates.mode, pruner.training, pruner.device)
    importance, entropy = HeadImportance(gates.heads).to(device), AttentionEntropy(gates.sites).to(device)
    pruner.to(device).eval()
    gates.mode = "open"
    try:
        for batch in track(loader, description="scoring heads", disable=trainer.global_rank > 0, transient=True):
            batch = move_data_to_device(batch, device)
            with trainer.precision_plugin.forward_context():
                importance.update(head_gradients(gates, lambda batch=batch: task.losses(backbone, batch)[0]))  # type: ignore[misc]
                with torch.no_grad(), observe_entropy(backbone, gates.sites, entropy, task.valid_queries(batch)):
                    task.losses(backbone, batch)
    finally:
        gates.mode = before[0]
        pruner.train(before[1]).to(before[2])
    return Scores(Importance(*(score.cpu() for score in importance.compute())), entropy.compute().cpu())
