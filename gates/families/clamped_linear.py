"""Gates that are plain numbers clamped to [0, 1], closed by an L1 price: the gates of DuoAttention (Xiao et al. 2024).

There the numbers are clipped at both ends, so that all heads that closed are equal, and a budget other than what the price
leaves has to break ties. Here a number that is pushed beyond an end goes on by tiny steps, which no gate shows: closed heads
rank by when they closed, and those that want to be more than open by how long they have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gates.families.base import LearnedGates

MEMORY = 1e-4
"""How far a number beyond an end goes on in one optimiser step at most: little, so that it can soon come back."""


def clamped(log_alpha: Tensor) -> Tensor:
    """``log_alpha`` clamped to [0, 1], with the gradient of ``log_alpha`` itself, so that a closed gate can open again."""
    passed = log_alpha - log_alpha.detach()  # exactly 0
    return log_alpha.detach().clamp(0.0, 1.0) + passed


def slowed(before: Tensor, after: Tensor) -> Tensor:
    """What an optimiser step from ``before`` to ``after`` comes to where it leads out of [0, 1], or further out.

    The part beyond the end, or beyond ``before`` if that was outside, shrinks from o to ``m * o / (o + m)`` with m
    :data:`MEMORY`: below m, and greater for a greater push.
    """
    low, high = before.clamp_max(0.0), before.clamp_min(1.0)
    down, up = (low - after).clamp_min(0.0), (after - high).clamp_min(0.0)
    return after.clamp(low, high) + MEMORY * (up / (up + MEMORY) - down / (down + MEMORY))


class ClampedLinear(LearnedGates):
    """Gates ``clamp(log_alpha, 0, 1)``, fully open at the start; nothing is drawn, and ``log_alpha`` is no logarithm here.

    Args:
        gates: number of gates.
    """

    def __init__(self, gates: int) -> None:
        super().__init__(gates, initial_log_alpha=1.0)
        self._before: Tensor | None = None  # log_alpha when gates were last used in training, so before the optimiser's step

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """The gates, the same in training, evaluation and all draws; see :class:`gates.families.base.LearnedGates`."""
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            gates = clamped(self.log_alpha.float())
        if not self.training:
            return gates
        self._before = self.log_alpha.detach().clone()
        return gates if draws is None else gates.expand(draws, -1)

    def open_probability(self) -> Tensor:
        """The gates themselves, ``[gates]``: their sum, priced, is the L1 penalty."""
        return clamped(self.log_alpha.float())

    @torch.no_grad()
    def clamp_(self) -> None:
        """Slow down what left [0, 1] since gates were last used in training; call it after every optimiser step."""
        if self._before is not None:
            self.log_alpha.copy_(slowed(self._before, self.log_alpha))
            self._before = None

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}"
