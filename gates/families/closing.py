"""When each gate closed for good: a ranking of all heads from one run with a price, for any budget."""

from __future__ import annotations

import torch
from torch import Tensor

NOT_CLOSED = -1
"""The closing step of a gate that is open."""


def update_closing_step(closing_step: Tensor, values: Tensor, step: int) -> Tensor:
    """Closing steps after one more optimiser step.

    Args:
        closing_step: state before the step, int64 ``[gates]``: the step since which a gate has been closed,
            :data:`NOT_CLOSED` if it is open.
        values: values of the gates in evaluation after the step, ``[gates]``; a gate is closed at 0.
        step: number of the step.

    Returns:
        ``[gates]``. A gate that opened again has its closing step taken back.
    """
    is_first = closing_step == NOT_CLOSED
    since = torch.where(is_first, torch.full_like(closing_step, step), closing_step)
    return torch.where(values <= 0, since, torch.full_like(closing_step, NOT_CLOSED))


def closing_ranking(closing_step: Tensor, log_alpha: Tensor) -> Tensor:
    """Scores that keep open gates first, then those that closed last; of equals the higher ``log_alpha``, then the earlier.

    Args:
        closing_step: closing steps ``[gates]`` from :func:`update_closing_step`.
        log_alpha: parameters of the gates, ``[gates]``.

    Returns:
        Ranks ``[gates]``, float64: 0 for the gate to give up first.
    """
    lateness = torch.where(closing_step == NOT_CLOSED, torch.iinfo(torch.int64).max, closing_step.long())
    by_log_alpha = torch.sort(log_alpha.double(), descending=True, stable=True).indices
    order = by_log_alpha[torch.sort(lateness[by_log_alpha], descending=True, stable=True).indices]
    ranks = torch.empty(len(order), dtype=torch.float64, device=order.device)
    ranks[order] = torch.arange(len(order) - 1, -1, -1, dtype=torch.float64, device=order.device)
    return ranks
