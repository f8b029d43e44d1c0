"""The expected time of gates in training, and what an open one costs: the measured table, relaxed so that it has a slope.

Between whole numbers of open gates, and wherever a measured table is flat for a while, the time of a site is its largest convex
minorant (:func:`gates.latency.table.convex_minorant`): its slope is above 0 wherever closing further gates would save time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gates.families.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.latency.table import TimeLimit, convex_minorant


class RelaxedTime:
    """The time that gates take in expectation.

    Args:
        limit: with the table of the model.
        stretch: temperature and stretch interval of the gates. With ``|log_alpha|`` limited, probabilities are between two
            others than 0 and 1, which count as closed and open here.

    Attributes:
        limit: milliseconds to come to.
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
        """Milliseconds that one more open gate costs, ``[gates]``, float64: the slope at its site.

        Args:
            probability: of each gate to be open, ``[gates]``.
        """
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
