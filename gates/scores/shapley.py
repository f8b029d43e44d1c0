"""Shapley values of heads (Held and Yang 2023, arXiv 2210.05709): what a head adds to the model on average over all coalitions.

Heads are players, and the value of a coalition is minus the loss of the model with its heads alone. The Shapley value of a head
is what the loss rises by when the head leaves, averaged over all orders in which all heads can leave one after the other. It is
signed: a head of negative value does harm. The values of all heads add up to the loss without any head minus the dense model's.

Orders are sampled. The Shapley value of a mean is the mean of Shapley values, so every example walks from the dense model to
the closed one in a random order of its own, with masks per example: as many passes over the data as there are heads give as
many orders as there are examples, and the standard error is that of a mean over independent examples.

Walks are *truncated* (after Ghorbani and Zou 2019, arXiv 1904.02868) where next to nothing can follow: as soon as the losses of
all walks are, in the mean, within a small share of the whole way from those without any head, each example's rest is divided
evenly among its heads that are left, which keeps the sum exact.
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
    """Return a random order of all gates for every example, ``[examples, gates]``. An order is a function of the number of its
    example alone, whichever process has the example."""
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
    """What each example's loss rises by as its gates leave in its order, ``[examples, gates]``, float64.

    Args:
        orders: from :func:`removal_orders`.
        losses_of: function from masks ``[examples, gates]``, one for each example, to their losses ``[examples]``.
        tolerance: share of the mean absolute change from the dense model to the closed one below which walks are truncated; 0
            walks them to their end.
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
    """Shapley values, each ``[gates]``, float64, in units of the loss.

    Args:
        values: estimates; negative for a head that does harm.
        standard_error: of these.
    """

    values: Tensor
    standard_error: Tensor


class ShapleyValues(HeadMetric):
    """Streams rows of :func:`shapley_rows` into their mean and its standard error; exact under DDP.

    Args:
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    total: Tensor
    square: Tensor
    samples: Tensor

    def __init__(self, gates: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("total", "square"):
            self.add_state(name, torch.zeros(gates, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, rows: Tensor) -> None:
        """Add rows ``[examples, gates]``.

        Raises:
            GateError: for rows of another shape.
        """
        check_rows(rows, len(self.total))
        self.total += rows.double().sum(0)
        self.square += rows.double().square().sum(0)
        self.samples += len(rows)

    def compute(self) -> Shapley:
        mean = self.total / self.samples
        variance = (self.square / self.samples - mean.square()).clamp(min=0) / (self.samples - 1).clamp(min=1)
        return Shapley(mean, variance.sqrt())
