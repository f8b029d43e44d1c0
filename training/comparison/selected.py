"""What a method decided: the heads that stay, and what that cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from training.comparison.cache import Experiment
from training.config import PriceOption
from training.runs.cost import NOTHING, Cost


@dataclass(frozen=True)
class Selection:
    """What a method decided.

    Args:
        mask: 0/1 ``[gates]``.
        values: gate values ``[gates]``: the mask, or rescaled.
        start: whose weights retraining starts from: the dense experiment or a learned one.
        changes: of the options of the module.
        ranking: scores behind the mask ``[gates]``, higher kept first; None for a search without a ranking.
        cost: of deciding.
        alpha: weight of HIS, of a method that has it.
        refit: whose weights are refitted to the mask; None where the weights stay as they are.
        closed_by_gates: see :func:`closed_by_gates`, before any search changed the mask that gates learned.
        refits_paid: masks whose refits are part of the cost.
    """

    mask: Tensor
    values: Tensor
    start: Experiment
    changes: Mapping[str, Any]
    ranking: Tensor | None
    cost: Cost = NOTHING
    alpha: float | None = None
    refit: Experiment | None = None
    closed_by_gates: float | None = None
    refits_paid: frozenset[tuple[float, ...]] = frozenset()

    def paid(self, experiment: Experiment) -> Selection:
        """The same with the cost of a further experiment."""
        return replace(self, cost=self.cost.then(Cost.of(experiment.result)))

    def refit_paid(self, mask: Tensor, refit: Experiment) -> Selection:
        """The same with the cost of a refit to a mask, which is paid for once."""
        values = tuple(mask.tolist())
        return self if values in self.refits_paid else replace(self.paid(refit), refits_paid=self.refits_paid | {values})

    def searched(self, experiment: Experiment) -> Selection:
        """The same with the mask of a search, which ranks no heads."""
        mask = torch.tensor(experiment.result["mask"])
        return replace(self.paid(experiment), mask=mask, values=mask, ranking=None)


def closed_by_gates(learned: Mapping[str, Any], mask: Tensor) -> float | None:
    """The share of the heads that a mask closes which gates had closed by themselves at the end of the prune phase, before
    their rank closed the rest; None where gates were not held to the budget of this mask.

    Args:
        learned: the result of an experiment that learned gates.
        mask: 0/1 ``[gates]``.
    """
    if not learned.get("price") or not learned["closed"] or learned["mask"] != mask.tolist():
        return None
    return float(learned["closed_by_gates"] / learned["closed"])


@dataclass(frozen=True)
class Priced:
    """Which gates a price leaves open.

    Args:
        method: that trained with it.
        price: of an open head, or of one of each kind.
        mask: 0/1 ``[gates]``, without regard to a budget.
    """

    method: str
    price: PriceOption
    mask: Tensor
