"""Estimate the Shapley values of heads (Held and Yang 2023, arXiv 2210.05709): the mean effect of a head over all coalitions.

The value of a coalition is minus the loss of the model with only its heads. The Shapley value of a head is the increase of the
loss when the head is removed, averaged over all orders of removal. A negative value means harm. The values of all heads sum to
the loss without heads minus the dense model's loss.

Orders are sampled. The Shapley value of a mean is the mean of Shapley values, so every example has its own random order, with
masks per example. One pass per head gives one order per example, and a standard error over independent examples.

Walks are *truncated* (after Ghorbani and Zou 2019, arXiv 1904.02868) when the mean loss is close to the loss without heads. The
rest of each example is divided evenly among its remaining heads, which keeps the sum exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gates.errors import GateError
from gates.scores.importance import check_rows
from gates.scores.metric import HeadMetric


def removal_orders(places: Sequence[int], gates: int, *, seed: int = 0) -> Tensor:
    """Return a random order of all gates for every example, ``[examples, gates]``, which only depends on its number."""
    orders = torch.empty(len(places), gates, dtype=torch.long)
    for row, place in enumerate(places):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
        orders[row] = torch.randperm(gates, generator=generator)
    return orders


def shapley_rows(
    orders: Tensor,
    losses_of: Callable[[Tensor], Tensor],
    *,
    mean: Callable[[Tensor], float] = lambda values: float(values.mean()),
    tolerance: float = 0.02,
) -> Tensor:
    """Return the increase of each example's loss by each gate in its order of removal, ``[examples, gates]``, float64.

    Args:
        orders: The orders from :func:`removal_orders`.
        losses_of: A function from masks ``[examples, gates]``, one for each example, to their losses ``[examples]``.
        mean: A function that averages over the examples of all processes.
        tolerance: The share of the mean absolute change of the loss at which walks are truncated; 0 for no truncation.
    """
    if tolerance < 0:
        raise GateError(f"the tolerance of truncated walks is {tolerance}; expected 0 (no truncation) or a small share above")
    examples, gates = orders.shape
    masks = torch.ones(examples, gates)
    before, closed = losses_of(masks).double(), losses_of(torch.zeros_like(masks)).double()
    enough = tolerance * mean((closed - before).abs())
    rows = torch.zeros(examples, gates, dtype=torch.float64)
    for going in orders[:, :-1].T.unsqueeze(-1):
        if mean((closed - before).abs()) < enough:
            break
        masks.scatter_(1, going, 0.0)
        after = losses_of(masks).double()
        rows.scatter_(1, going, (after - before).unsqueeze(-1))
        before = after
    return rows + masks * ((closed - before) / masks.sum(1)).unsqueeze(-1)


class Shapley(NamedTuple):
    """Hold Shapley values, each ``[gates]``, float64, in units of the loss."""

    values: Tensor  # The estimates, negative for a harmful head
    standard_error: Tensor  # The standard errors of the estimates


class ShapleyValues(HeadMetric):
    """Stream rows of :func:`shapley_rows` into their mean and its standard error, exactly under DDP."""

    total: Tensor
    square: Tensor
    samples: Tensor

    def __init__(self, gates: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_sums(total=[gates], square=[gates])
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rows: Tensor) -> None:
        """Add rows ``[examples, gates]``."""
        check_rows(rows, len(self.total))
        self.total += rows.double().sum(0)
        self.square += rows.double().square().sum(0)
        self.samples += len(rows)

    def compute(self) -> Shapley:
        mean = self.total / self.samples
        variance = (self.square / self.samples - mean.square()).clamp(min=0) / (self.samples - 1).clamp(min=1)
        return Shapley(mean, variance.sqrt())
