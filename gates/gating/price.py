"""The price of open gates, which training adds to the task loss: given, or solved for a budget.

The penalty is always computed from the closed-form expectation, never from a sample of the gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.gating.latency import TimeLimit, convex_minorant


def l0_penalty(open_probability: Tensor, price: Tensor | float) -> Tensor:
    """Return the penalty of Voita et al. 2019: the price times the expected number of open heads.

    It is the plain sum of their paper; their released code divides it by the number of sites.

    Args:
        open_probability: The probabilities P(z > 0), ``[heads]``.
        price: The price lambda, a scalar or ``[heads]``. Must be at least 0.

    >>> float(l0_penalty(torch.tensor([1.0, 0.5, 0.0]), price=0.1))
    0.15000000596046448
    """
    return (price * open_probability).sum()


def l0_gradient(log_alpha: Tensor, stretch: Stretch) -> Tensor:
    """Return the derivative of the expected number of open heads by each ``log_alpha``: p (1 - p), with p = P(z > 0)."""
    probability = open_probability(log_alpha, stretch)
    return torch.addcmul(probability, probability, probability, value=-1)


@torch.no_grad()
def solve_price(
    log_alpha: Tensor,
    expected: float,
    stretch: Stretch,
    *,
    gradient: Tensor | None = None,
    costs: Tensor | None = None,
    total: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the smallest price at which one gradient step leaves at most the expected number of open heads.

    The step descends from ``log_alpha`` on :func:`l0_penalty` with a learning rate of 1. The expectation falls with the price.
    A first set of prices, up to one that closes every head, brackets the solution. A second set divides the bracket evenly, and
    between two of its prices the expectation is interpolated linearly. The error is below a thousandth of a head, and nothing
    waits for a value on the host.

    Args:
        log_alpha: The parameters of the gates, ``[heads]``, within their limits.
        expected: The maximum expected number of open heads, clamped to the range that the limits allow.
        gradient: The :func:`l0_gradient` of these gates, if it is known.
        costs: The cost of each open head at a price of 1, ``[heads]``, at least 0; 1 by default.
        total: A function from open probabilities ``[n, heads]`` to the expectation ``[n]``, which rises with each of them;
            their sum by default.

    Returns:
        The price, a float32 scalar; 0 if no step is needed.

    >>> log_alpha = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    >>> stepped = log_alpha - solve_price(log_alpha, 2.0, Stretch()) * l0_gradient(log_alpha, Stretch())
    >>> round(float(open_probability(stepped, Stretch()).sum()), 3)
    2.0
    """
    log_alpha, unit = log_alpha.float(), None
    opened = 1 / (1 + math.exp(stretch.temperature * math.log(-stretch.low / stretch.high) - LOG_ALPHA_LIMIT))
    search = _Search.on(log_alpha.device, 2 * LOG_ALPHA_LIMIT / (opened * (1 - opened)))
    slopes = l0_gradient(log_alpha, stretch) if gradient is None else gradient
    if costs is not None:  # scaled, so that the highest price of the search closes every head
        slopes = (slopes * costs).float()
        closing = (log_alpha + LOG_ALPHA_LIMIT) / slopes
        unit = closing.where(slopes > 0, 0.0).amax() / search.first[-1]
        slopes = slopes * unit

    def expectations(prices: Tensor) -> Tensor:
        stepped = torch.addcmul(log_alpha, prices, slopes, value=-1).clamp_(min=-LOG_ALPHA_LIMIT)
        probability = open_probability(stepped, stretch)
        return probability.sum(1) if total is None else total(probability).to(prices)

    too_low = (expectations(search.first) > expected).sum()
    prices = search.second.index_select(1, too_low)
    found = expectations(prices)
    falls = torch.addmv(search.tiny, search.difference, found)
    passed = ((found - expected) / falls).clamp_(0.0, 1.0)  # the share of each interval that lies below the solution
    price = torch.dot(torch.addmv(search.start, search.weights, passed), prices.view(-1))
    return price if unit is None else price * unit


@dataclass(frozen=True)
class _Search:
    """The constants of the search for a price, on one device."""

    first: Tensor  # The prices of the first set, ``[n, 1]``: 0, then a geometric series up to the highest
    second: Tensor  # For each number of first prices that are too low, the prices of the second set, ``[n, n + 1]``
    difference: Tensor  # The matrix that takes each value minus the next, ``[n, n]``; the last row is 0
    tiny: Tensor  # A small number that is added to differences, ``[n]``, so that none is 0
    # The vector and the matrix that turn the shares of the intervals into the weights of their ends.
    start: Tensor
    weights: Tensor

    @staticmethod
    @cache
    def on(device: torch.device, highest: float, n: int = 128) -> _Search:
        with torch.inference_mode(False):
            series = highest * torch.logspace(-7, 0, n - 1, dtype=torch.float64)
            first = torch.cat([series.new_zeros(1), series])
            low, high = torch.cat([first[:1], first]), torch.cat([first, first[-1:]])
            second = low + (high - low) * torch.linspace(0, 1, n, dtype=torch.float64).unsqueeze(1)
            difference = torch.eye(n, dtype=torch.float64) - torch.diag(torch.ones(n - 1, dtype=torch.float64), 1)
            difference[-1] = 0
            tiny = torch.full((n,), 1e-30, dtype=torch.float64)
            start = torch.eye(n, dtype=torch.float64)[0]
            constants = (first.unsqueeze(1), second, difference, tiny, start, -difference.t())
            return _Search(*(constant.to(device, torch.float32) for constant in constants))


# The expected time of gates in training, and the cost of an open gate. The measured table is relaxed so that it has a slope:
# the time of a site is the largest convex minorant of its measurements (:func:`gates.gating.latency.convex_minorant`). Its
# slope is above 0 wherever closing further gates would save time, even if the table is flat there.


class RelaxedTime:
    """The expected time of gates, and its limit in milliseconds (``limit``).

    ``|log_alpha|`` is limited, so the lowest and the highest open probability count as closed and open.
    """

    def __init__(self, limit: TimeLimit, stretch: Stretch) -> None:
        table = limit.table
        self.limit = limit.milliseconds
        self.rest = table.rest
        sizes = torch.tensor([site.gates for site in table.sites])
        self.site_index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self.sizes = sizes.double()
        lines = [_lines(site.milliseconds) for site in table.sites]
        longest = max(map(len, lines))
        # The last line of a site with fewer lines is repeated, which changes no maximum.
        padded = torch.tensor([[*of, *[of[-1]] * (longest - len(of))] for of in lines], dtype=torch.float64)
        self.starts, self.slopes = padded.unbind(-1)
        bounds = torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT], dtype=torch.float64)
        self.closed, self.opened = open_probability(bounds, stretch).tolist()

    def to_(self, device: torch.device) -> RelaxedTime:
        """Move to the device of the gates and return itself."""
        for name in ("site_index", "sizes", "starts", "slopes"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def time(self, probability: Tensor) -> Tensor:
        """Return the expected milliseconds ``[...]`` of gates with these open probabilities, ``[..., gates]``."""
        return self.rest + self._lines_at(self._counts(probability)).amax(-1).sum(-1)

    def costs(self, probability: Tensor) -> Tensor:
        """Return the milliseconds that one more open gate costs, ``[gates]``, float64: the slope at its site."""
        steepest = self._lines_at(self._counts(probability)).argmax(-1, keepdim=True)
        return self.slopes.gather(-1, steepest).squeeze(-1)[self.site_index]

    def _counts(self, probability: Tensor) -> Tensor:
        """Return the expected open gates, ``[..., sites]``."""
        is_open = (probability.double() - self.closed) / (self.opened - self.closed)
        counts = is_open.new_zeros((*is_open.shape[:-1], len(self.sizes))).index_add(-1, self.site_index, is_open)
        return counts.clamp(min=0).minimum(self.sizes)

    def _lines_at(self, counts: Tensor) -> Tensor:
        """Return each line of each site's minorant, ``[..., sites, lines]``; the largest is its value."""
        return self.starts + self.slopes * counts.unsqueeze(-1)


def _lines(times: Sequence[float]) -> list[tuple[float, float]]:
    """Return the lines (value at 0, slope) whose maximum is the convex minorant."""
    found = []
    for (before, low), (after, high) in pairwise(convex_minorant(times)):
        slope = (high - low) / (after - before)
        found.append((low - slope * before, slope))
    return found
