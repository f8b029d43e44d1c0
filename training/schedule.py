"""The three phases of a run, and how targets and learning rates move through them. Pure arithmetic on steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["warm-up", "prune", "settle"]


@dataclass(frozen=True)
class Schedule:
    """When the phases of a run end.

    Args:
        warm_up, prune, end: optimiser steps after which warm-up, prune and settle end.
        ramp_share: share of the prune phase over which the target or the price goes to its final value.
        rise_share: share of all steps over which the backbone's learning rate rises.
    """

    warm_up: int = 0
    prune: int = 0
    end: int = 0
    ramp_share: float = 1.0
    rise_share: float = 0.0

    @classmethod
    def of_epochs(
        cls, steps: int, *, warm_up: float, prune: float, settle: float, ramp_share: float, rise_share: float
    ) -> Schedule:
        """Divide ``steps`` among phases in proportion to their length in epochs; the prune phase has at least one."""
        epochs = warm_up + prune + settle
        first = min(steps - 1, round(steps * warm_up / epochs))
        second = max(1, round(steps * prune / epochs))
        return cls(first, min(steps, first + second), steps, ramp_share, rise_share)

    def phase(self, step: int) -> Phase:
        return "warm-up" if step < self.warm_up else "prune" if step < self.prune else "settle"

    def ramp(self, step: int) -> float:
        """How far the target or the price has gone, 0 to 1; 0 outside the prune phase."""
        if self.phase(step) != "prune":
            return 0.0
        return min(1.0, (step - self.warm_up + 1) / max(1.0, self.ramp_share * (self.prune - self.warm_up)))

    def backbone_rate(self, step: int) -> float:
        """Factor of the backbone's learning rate: a linear rise, then a linear fall to 0 at the end."""
        rise = max(1, round(self.rise_share * self.end))
        return min((step + 1) / rise, max(0.0, (self.end - step) / max(1, self.end - rise)))

    def gate_rate(self, step: int) -> float:
        """Factor of the learning rate of gates and multipliers, which rest outside the prune phase."""
        return 1.0 if self.phase(step) == "prune" else 0.0
