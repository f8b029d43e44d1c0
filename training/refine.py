"""Refine a mask by swaps on training data: the bridge between :mod:`gates.swap` and a trainer's model and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.errors import GateError
from gates.objective import Budget
from gates.swap import Limits, Refinement, refine_by_swaps

if TYPE_CHECKING:
    from training.data.base import TaskData
    from training.module import HeadPruner

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class SwapSearch:
    """How long to search.

    Args:
        rows: training examples; one half proposes swaps by its gradient, the other decides on them by its loss.
        passes: over the deciding half at most.
    """

    rows: int = 1024
    passes: float = 40.0

    def __post_init__(self) -> None:
        for name in ("rows", "passes"):
            if getattr(self, name) < 2:
                raise GateError(f"--swap.{name} is {getattr(self, name)}; expected at least 2")


def refine(
    pruner: HeadPruner, data: TaskData, trainer: pl.Trainer, mask: Tensor, search: SwapSearch, *, budget: Budget | None
) -> Refinement:
    """The mask ``[gates]`` refined by swaps on the pruner's present weights; under a budget per kind, gates are swapped
    within their kind.

    Dropout is off. The pruner's gates are left as they were.
    """
    gates, task, backbone = pruner.gates, pruner.task, pruner.backbone
    device = trainer.strategy.root_device
    training = [module for module in pruner.modules() if module.training]
    pruner.to(device).eval()
    proposing, deciding = [
        [move_data_to_device(batch, device) for batch in loader] for loader in data.calibration_dataloaders(search.rows)
    ]

    def total_loss(values: Tensor, batch: Batch) -> Tensor:
        with trainer.strategy.precision_plugin.forward_context(), gates.use(values):
            return task.losses(backbone, batch)[0].sum()

    def over_processes(total: Tensor) -> Tensor:
        """Each process has a share of the examples, and all have to come to the same decisions."""
        reduced = trainer.strategy.reduce(total, reduce_op="sum")
        assert isinstance(reduced, Tensor)
        return reduced

    @torch.no_grad()
    def loss(values: Tensor, share: float) -> float:
        batches = deciding[:: max(1, round(1 / share))]
        total = torch.stack([total_loss(values, batch) for batch in batches]).double().sum()
        examples = torch.tensor(float(sum(len(batch["labels"]) for batch in batches)), dtype=torch.float64, device=device)
        return float(over_processes(total) / over_processes(examples))

    def gradient(values: Tensor) -> Tensor:
        leaf = values.clone().requires_grad_()
        for batch in proposing:
            total_loss(leaf, batch).backward()
        assert leaf.grad is not None
        return over_processes(leaf.grad)

    frozen = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        return refine_by_swaps(
            mask.to(device),
            loss=loss,
            gradient=gradient,
            limits=Limits(
                within=gates.kind_index() if budget is not None and budget.per_kind else None,
                layer_index=gates.layer_index(),
                minimum_per_layer=pruner.hparams["minimum_per_layer"],
            ),
            passes=search.passes,
        )
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True
