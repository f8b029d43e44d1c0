"""What training with gates minimises besides the task loss: a price on open gates, given or solved for a budget.

The penalty is always computed from the closed-form expectation, never from a sample of the gates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gates.budget import Budget
from gates.families.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.sites import KINDS


def l0_penalty(open_probability: Tensor, price: Tensor | float) -> Tensor:
    """The penalty of Voita et al. 2019: the price times the expected number of open heads.

    It is the plain sum of their paper; their released code divides it by the number of sites.

    Args:
        open_probability: P(z > 0), ``[heads]``.
        price: lambda, a scalar or one per head ``[heads]``.

    >>> float(l0_penalty(torch.tensor([1.0, 0.5, 0.0]), price=0.1))
    0.15000000596046448
    """
    return (price * open_probability).sum()


def l0_gradient(log_alpha: Tensor, stretch: Stretch) -> Tensor:
    """The derivative of the expected number of open heads by each ``log_alpha``: p (1 - p), with p = P(z > 0)."""
    probability = open_probability(log_alpha, stretch)
    return probability * (1 - probability)


@torch.no_grad()
def solve_price(log_alpha: Tensor, expected: float, stretch: Stretch) -> Tensor:
    """The smallest price of an open head under which one gradient step leaves no more open heads than asked.

    The step goes from ``log_alpha`` along the gradient of the penalty of :func:`l0_penalty` with a learning rate of 1. The
    expectation falls with the price, so 32 prices at once close in on it, five times.

    Args:
        log_alpha: parameters of the gates, ``[heads]``.
        expected: open heads to have in expectation, at most; brought into the range that the limits allow.
        stretch: temperature and stretch interval of the gates.

    Returns:
        A scalar, float64; 0 where there are no more open heads than asked already.

    >>> log_alpha = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    >>> stepped = step_by_price(log_alpha, solve_price(log_alpha, 2.0, Stretch()), Stretch())
    >>> round(float(open_probability(stepped, Stretch()).sum()), 3)
    2.0
    """
    values = log_alpha.double()
    low = values.new_zeros(())
    high = ((values + LOG_ALPHA_LIMIT) / l0_gradient(values, stretch)).max().clamp(min=0)  # closes every head
    shares = torch.linspace(0, 1, 33, dtype=values.dtype, device=values.device)
    for _ in range(5):
        prices = low + (high - low) * shares
        enough = open_probability(step_by_price(values, prices.unsqueeze(1), stretch), stretch).sum(1) <= expected
        enough[-1] = True
        first = enough.int().argmax()
        low, high = prices[(first - 1).clamp(min=0)], prices[first]
    return high


def step_by_price(log_alpha: Tensor, price: Tensor, stretch: Stretch) -> Tensor:
    """``log_alpha`` after a step of gradient descent on the penalty, with a learning rate of 1, within its limits.

    Args:
        log_alpha: parameters of the gates, ``[heads]``.
        price: of an open head, a scalar, or prices ``[n, 1]`` to step by each.
        stretch: temperature and stretch interval of the gates.
    """
    stepped = log_alpha - price * l0_gradient(log_alpha, stretch)
    return stepped.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


@torch.no_grad()
def project_to_budget(log_alpha: Tensor, expected: float, stretch: Stretch) -> Tensor:
    """Shift all ``log_alpha`` by one number so that the expected number of open heads is as asked.

    The differences between heads, and so their ranking, stay as they are, but for the limits on ``|log_alpha|``.

    Args:
        log_alpha: parameters of the gates, ``[heads]``.
        expected: open heads to have in expectation; brought into the range that the limits allow.
        stretch: temperature and stretch interval of the gates.

    Returns:
        New ``log_alpha`` ``[heads]`` within its limits.
    """
    values = log_alpha.double()
    low = -2 * LOG_ALPHA_LIMIT - values.abs().max()
    high = -low

    def shifted(shift: Tensor) -> Tensor:
        return (values + shift).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    for _ in range(50):  # bisection: the sum grows with the shift
        middle = (low + high) / 2
        too_many = open_probability(shifted(middle), stretch).sum() > expected
        low, high = torch.where(too_many, low, middle), torch.where(too_many, middle, high)
    return shifted((low + high) / 2).to(log_alpha.dtype)


class TargetBudget(nn.Module):
    """An augmented Lagrangian that draws the expected number of open heads to a budget
    (Wang, Wohlwend and Lei 2020; Xia, Zhong and Chen 2022).

    ``lambda1 * (e - t) + lambda2 * (e - t)**2`` with e the expected open fraction and t its target; the
    multipliers *ascend*: put them in an optimiser group with ``maximize=True``. One pair for the whole model, or
    one for each kind of a per-kind budget.

    Args:
        budget: budget to reach.
        heads: heads of each kind in the model.
        stretch: temperature and stretch interval of the gates. With ``|log_alpha|`` limited, a lone gate's open
            probability can be neither 0 nor 1, so the target is the expectation when exactly the budgeted gates are at one
            limit and the rest at the other.
        start: open fraction from which the target sets out; 1 in the papers.
    """

    reachable: Tensor
    heads: Tensor

    def __init__(self, budget: Budget, heads: Mapping[str, int], stretch: Stretch, *, start: float = 1.0) -> None:
        super().__init__()
        self.start = start
        self.kinds = list(budget.per_kind)
        counts = [heads[kind] for kind in self.kinds] or [sum(heads.values())]
        kept = list(budget.per_kind.values()) or [budget.total]
        closed, opened = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch).tolist()
        reachable = [(k * opened + (count - k) * closed) / count for k, count in zip(kept, counts, strict=True)]
        self.lambda1 = nn.Parameter(torch.zeros(len(counts)))
        self.lambda2 = nn.Parameter(torch.zeros(len(counts)))
        self.register_buffer("reachable", torch.tensor(reachable), persistent=False)
        self.register_buffer("heads", torch.tensor(counts, dtype=torch.float32), persistent=False)

    def forward(self, open_probability: Tensor, kind_index: Tensor, progress: float) -> Tensor:
        """The penalty, a scalar.

        Args:
            open_probability: P(z > 0) of each head, ``[heads]``.
            kind_index: kind of each head as a position in :data:`gates.sites.KINDS`, ``[heads]``.
            progress: 0 to 1, how far the target has gone on its way from all heads to the budget.
        """
        excess = self.expected(open_probability, kind_index) / self.heads - self.target(progress)
        return (self.lambda1 * excess + self.lambda2 * excess.square()).sum()

    def expected(self, open_probability: Tensor, kind_index: Tensor) -> Tensor:
        """Expected open heads, in total or for each budgeted kind."""
        if not self.kinds:
            return open_probability.sum().unsqueeze(0)
        return torch.stack([open_probability[kind_index == KINDS.index(kind)].sum() for kind in self.kinds])

    def target(self, progress: float) -> Tensor:
        """The open fraction aimed at: it goes linearly from the start to what the budget comes to."""
        return self.start + min(max(progress, 0.0), 1.0) * (self.reachable - self.start)
