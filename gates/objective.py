"""What training with gates minimises besides the task loss: a price on open gates, or a target budget.

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
