"""Refine a mask on training data: :mod:`gates.search` with a trainer's model and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytorch_lightning as pl
from torch import Tensor

from gates.budget import Budget
from gates.errors import GateError
from gates.search.sampled_masks import BestDraw, best_draw, draw_masks
from gates.search.swaps import LEAST_PASSES, Limits, Refinement, refine_by_swaps
from training.scoring.calibration import calibration

if TYPE_CHECKING:
    from training.data.base import TaskData
    from training.pruner.module import HeadPruner


@dataclass(frozen=True)
class SwapSearch:
    """How long to search.

    Args:
        rows: training examples; one half proposes swaps by its gradient, the other decides on them by its loss.
        passes: over the deciding half after which nothing new is tried.
    """

    rows: int = 1024
    passes: float = 40.0

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("passes", LEAST_PASSES)):
            if getattr(self, name) < least:
                raise GateError(f"--swap.{name} is {getattr(self, name)}; expected at least {least}")


@dataclass(frozen=True)
class DrawSearch:
    """How masks are drawn around a ranking.

    Args:
        rows: training examples, of which one half decides on the masks by its loss, as for swaps.
        count: of masks.
        temperature: of the draws, for log_alpha or for ranks on its scale.
    """

    rows: int = 1024
    count: int = 64
    temperature: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("rows", 2), ("count", 1)):
            if getattr(self, name) < least:
                raise GateError(f"--draws.{name} is {getattr(self, name)}; expected at least {least}")
        if not self.temperature > 0:
            raise GateError(f"--draws.temperature is {self.temperature}; expected a number above 0")


def refine(
    pruner: HeadPruner, data: TaskData, trainer: pl.Trainer, mask: Tensor, search: SwapSearch, *, budget: Budget
) -> Refinement:
    """The mask ``[gates]`` refined by swaps on the pruner's present weights; under a budget per kind, gates are swapped
    within their kind.

    Dropout is off. The pruner's gates are left as they were.
    """
    gates = pruner.gates
    with calibration(pruner, data, trainer, search.rows) as found:
        return refine_by_swaps(
            mask.to(found.device),
            loss=found.loss,
            gradient=found.gradient,
            limits=Limits(
                within=gates.kind_index() if budget.per_kind else None,
                layer_index=gates.layer_index(),
                minimum_per_layer=pruner.hparams["minimum_per_layer"],
            ),
            passes=search.passes,
        )


def draw(
    pruner: HeadPruner,
    data: TaskData,
    trainer: pl.Trainer,
    mask: Tensor,
    scores: Tensor,
    search: DrawSearch,
    *,
    budget: Budget,
    seed: int,
) -> BestDraw:
    """The best of a mask ``[gates]`` and of masks drawn by scores ``[gates]`` within its budget, on the pruner's present
    weights.

    Dropout is off. The pruner's gates are left as they were.
    """
    draws = draw_masks(
        scores,
        budget,
        kind_index=pruner.gates.kind_index(),
        layer_index=pruner.gates.layer_index(),
        minimum_per_layer=pruner.hparams["minimum_per_layer"],
        count=search.count,
        temperature=search.temperature,
        seed=seed,
    )
    with calibration(pruner, data, trainer, search.rows) as found:
        return best_draw(mask.to(found.device), [one.to(found.device) for one in draws], loss=found.loss)
