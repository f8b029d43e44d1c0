"""Refine a mask by swaps on training data: the bridge between :mod:`gates.swap` and a trainer's model and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.errors import GateError
from gates.swap import Refinement, refine_by_swaps
from training.data.classification import ClassificationData
from training.module import HeadPruner

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class SwapSearch:
    """How long to search.

    Args:
        rows: training examples; one half proposes swaps by its gradient, the other decides on them by its loss.
        evaluations: losses to compute at most.
        patience: losses computed in a row without a fall, after which the search ends.
    """

    rows: int = 2048
    evaluations: int = 32
    patience: int = 8

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("evaluations", 2), ("patience", 1)):
            if getattr(self, name) < least:
                raise GateError(f"--swap.{name} is {getattr(self, name)}; expected at least {least}")


def refine(pruner: HeadPruner, data: ClassificationData, trainer: pl.Trainer, mask: Tensor, search: SwapSearch) -> Refinement:
    """The mask ``[gates]`` refined by swaps on the pruner's present weights, gates of one budget among themselves.

    Dropout is off. The pruner's gates are left as they were.
    """
    gates, task, backbone = pruner.gates, pruner.task, pruner.backbone
    device = trainer.strategy.root_device
    training = [module for module in pruner.modules() if module.training]
    pruner.to(device).eval()
    proposing, deciding = [
        [move_data_to_device(batch, device) for batch in loader] for loader in data.calibration_dataloaders(search.rows)
    ]

    def mean_loss(values: Tensor, batches: list[Batch], *, backward: bool) -> float:
        total, rows = 0.0, sum(len(batch["labels"]) for batch in batches)
        for batch in batches:
            with trainer.strategy.precision_plugin.forward_context(), gates.use(values):
                loss = task.losses(backbone, batch)[0].sum() / rows
            if backward:
                loss.backward()
            total += float(loss.detach())
        return total

    @torch.no_grad()
    def loss(values: Tensor) -> float:
        return mean_loss(values, deciding, backward=False)

    def gradient(values: Tensor) -> Tensor:
        leaf = values.clone().requires_grad_()
        mean_loss(leaf, proposing, backward=True)
        assert leaf.grad is not None
        return leaf.grad

    frozen = [parameter for parameter in pruner.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        return refine_by_swaps(
            mask.to(device),
            loss=loss,
            gradient=gradient,
            within=gates.kind_index() if pruner.budget is not None and pruner.budget.per_kind else None,
            layer_index=gates.layer_index(),
            minimum_per_layer=pruner.hparams["minimum_per_layer"],
            evaluations=search.evaluations,
            patience=search.patience,
        )
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
