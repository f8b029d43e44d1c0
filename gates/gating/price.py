"""What training with gates minimises besides the task loss: a price on open gates, given or solved for a budget.

The penalty is always computed from the closed-form expectation, never from a sample of the gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.gating.latency import TimeLimit, convex_minorant


def l0_penalty(open_probability: Tensor, price: Tensor | float) -> Tensor:
    """The penalty of Voita et al. 2019: the price times the expected number of open heads.

    It is the plain sum of their paper; their released code divides it by the number of sites.

    Args:
        open_probability: P(z > 0), ``[heads]``.
        price: lambda, a scalar or one per head ``[heads]``; at least 0.

    >>> float(l0_penalty(torch.tensor([1.0, 0.5, 0.0]), price=0.1))
    0.15000000596046448
    """
    return (price * open_probability).sum()


def l0_gradient(log_alpha: Tensor, stretch: Stretch) -> Tensor:
    """The derivative of the expected number of open heads by each ``log_alpha``: p (1 - p), with p = P(z > 0)."""
    probability = open_probability(log_alpha, stretch)
    return probability * (1 - probability)


@torch.no_grad()
def solve_price(
    log_alpha: Tensor,
    expected: float,
    stretch: Stretch,
    *,
    costs: Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The smallest price of an open head under which one gradient step leaves no more open heads than asked.

    The step goes from ``log_alpha`` along the gradient of the penalty of :func:`l0_penalty` with a learning rate of 1. The
    expectation falls with the price, so 32 prices at once close in on it, five times. Nothing waits for a value on the host.

    Args:
        log_alpha: parameters of the gates, ``[heads]``.
        expected: open heads to have in expectation, at most; brought into the range that the limits allow.
        costs: what an open head costs at a price of 1, ``[heads]``, at least 0; 1 by default. The step is by price times cost.
        total: function from the probabilities to be open ``[n, heads]`` to what is expected, ``[n]``, which falls with each
            of them; their sum by default.

    Returns:
        A scalar, float64; 0 where there are no more open heads than asked already.

    >>> log_alpha = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    >>> stepped = step_by_price(log_alpha, solve_price(log_alpha, 2.0, Stretch()), Stretch())
    >>> round(float(open_probability(stepped, Stretch()).sum()), 3)
    2.0
    """
    values, total = log_alpha.double(), total or (lambda probability: probability.sum(1))
    slopes = l0_gradient(values, stretch) if costs is None else costs * l0_gradient(values, stretch)
    low = values.new_zeros(())
    closing = (values + LOG_ALPHA_LIMIT) / slopes  # the price that closes a head
    high = closing.where(slopes > 0, low).max().clamp(min=0)
    shares = torch.linspace(0, 1, 33, dtype=values.dtype, device=values.device)
    around = torch.arange(-1, 1, device=values.device)  # the last price that is too low and the first that is enough
    for _ in range(5):
        prices = low + (high - low) * shares
        stepped = (values - prices.unsqueeze(1) * slopes).clamp(min=-LOG_ALPHA_LIMIT)
        too_low = (total(open_probability(stepped, stretch)) > expected).sum()
        low, high = prices[(too_low + around).clamp(0, len(shares) - 1)]
    return high


def step_by_price(log_alpha: Tensor, price: Tensor, stretch: Stretch) -> Tensor:
    """Return ``log_alpha`` ``[heads]`` after a step of gradient descent on the penalty, with a learning rate of 1, within its
    limits. The price is one of an open head, one per head, or several to step by each, ``[n, 1]`` or ``[n, heads]``."""
    stepped = log_alpha - price * l0_gradient(log_alpha, stretch)
    return stepped.clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


# The expected time of gates in training, and what an open one costs: the measured table, relaxed so that it has a slope.
#
# Between whole numbers of open gates, and wherever a measured table is flat for a while, the time of a site is its largest
# convex minorant (:func:`gates.gating.latency.convex_minorant`): its slope is above 0 wherever closing further gates would save
# time.


class RelaxedTime:
    """The time that gates take in expectation, and the milliseconds to come to (``limit``). With ``|log_alpha|`` limited,
    probabilities are between two others than 0 and 1, which count as closed and open here."""

    def __init__(self, limit: TimeLimit, stretch: Stretch) -> None:
        table = limit.table
        self.limit = limit.milliseconds
        self.rest = table.rest
        sizes = torch.tensor([site.gates for site in table.sites])
        self.site_index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self.sizes = sizes.double()
        lines = [_lines(site.milliseconds) for site in table.sites]
        longest = max(map(len, lines))
        # Of a site with fewer lines the last is repeated, which changes no maximum.
        padded = torch.tensor([[*of, *[of[-1]] * (longest - len(of))] for of in lines], dtype=torch.float64)
        self.starts, self.slopes = padded.unbind(-1)
        bounds = torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT], dtype=torch.float64)
        self.closed, self.opened = open_probability(bounds, stretch).tolist()

    def to_(self, device: torch.device) -> RelaxedTime:
        """Move to the device of the gates; returns itself."""
        for name in ("site_index", "sizes", "starts", "slopes"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def time(self, probability: Tensor) -> Tensor:
        """Expected milliseconds ``[...]`` of gates that are open with these probabilities, ``[..., gates]``."""
        return self.rest + self._lines_at(self._counts(probability)).amax(-1).sum(-1)

    def costs(self, probability: Tensor) -> Tensor:
        """Return the milliseconds that one more open gate costs, ``[gates]``, float64: the slope at its site."""
        steepest = self._lines_at(self._counts(probability)).argmax(-1, keepdim=True)
        return self.slopes.gather(-1, steepest).squeeze(-1)[self.site_index]

    def _counts(self, probability: Tensor) -> Tensor:
        """Expected open gates ``[..., sites]``."""
        is_open = (probability.double() - self.closed) / (self.opened - self.closed)
        counts = is_open.new_zeros((*is_open.shape[:-1], len(self.sizes))).index_add(-1, self.site_index, is_open)
        return counts.clamp(min=0).minimum(self.sizes)

    def _lines_at(self, counts: Tensor) -> Tensor:
        """Each line of each site's minorant ``[..., sites, lines]``; the largest is its value."""
        return self.starts + self.slopes * counts.unsqueeze(-1)


def _lines(times: Sequence[float]) -> list[tuple[float, float]]:
    """The lines (value at 0, slope) whose maximum the convex minorant is."""
    corners = convex_minorant(times)
    found = []
    for (before, low), (after, high) in pairwise(corners):
        slope = (high - low) / (after - before)
        found.append((low - slope * before, slope))
    return found
