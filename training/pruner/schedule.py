"""The three phases of a run, and how targets and learning rates move through them. Pure arithmetic on steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gates.gating.schedule import ramped
from training.config import Decay, PrunerOptions

Phase = Literal["finetune", "prune", "retrain"]


@dataclass(frozen=True)
class Schedule:
    """When the phases of a run end.

    Args:
        finetune, prune, end: The optimiser steps after which the phases finetune, prune and retrain end.
        ramp_share: The share of the prune phase over which the target or the price goes to its final value.
        rise_share: The share of a cycle's steps over which the backbone's learning rate rises.
        decay: How the rate falls after its rise: ``linear`` to 0 at the cycle's end, or as in ``noam``, the schedule of
            Vaswani et al. 2017, with the inverse square root of the step.
        second_peak: The peak of the second cycle of the learning rate, relative to the first. The first cycle is fine-tuning,
            so that the dense model is trained to its end; the second one is the rest.
        pipelined: Whether the backbone is frozen in the prune phase, so that the second cycle begins with the retrain phase.
    """

    finetune: int = 0
    prune: int = 0
    end: int = 0
    ramp_share: float = 1.0
    rise_share: float = 0.0
    decay: Decay = "linear"
    second_peak: float = 1.0
    pipelined: bool = False

    @classmethod
    def of_options(cls, steps: int, options: PrunerOptions, *, pipelined: bool = False) -> Schedule:
        """Divide ``steps`` among phases in proportion to their length in epochs.

        The prune phase has at least one step, unless its length is 0. ``pipelined`` is as in the class.
        """
        epochs, least = options.finetune + options.prune + options.retrain, 1 if options.prune > 0 else 0
        finetune = min(steps - least, round(steps * options.finetune / epochs))
        prune = min(steps, finetune + max(least, round(steps * options.prune / epochs)))
        peak, first = options.prune_learning_rate, options.learning_rate
        second_peak = peak / first if peak is not None and first else 1.0
        return cls(finetune, prune, steps, options.ramp, options.lr_warm_up, options.lr_decay, second_peak, pipelined)

    def shortened(self, start: int, steps: int) -> Schedule:
        """Return the same schedule to step ``start``, after which only ``steps`` follow; the prune phase keeps its share of
        them. A cycle of the learning rate that has begun before is squeezed as a whole."""
        if start >= self.prune:
            return replace(self, end=start + steps)
        share = (self.prune - start) / (self.end - start)
        return replace(self, prune=start + round(share * steps), end=start + steps)

    def phase(self, step: int) -> Phase:
        return "finetune" if step < self.finetune else "prune" if step < self.prune else "retrain"

    def ramp(self, step: int) -> float:
        """Return the progress of the target or the price, 0 to 1; 0 outside the prune phase."""
        if self.phase(step) != "prune":
            return 0.0
        return ramped(step - self.finetune + 1, self.ramp_share * (self.prune - self.finetune))

    def progress(self, step: int, *, on_ramp: bool) -> float:
        """Return the progress of pruning, 0 before the prune phase and 1 after it.

        Args:
            on_ramp: Whether it ends with the ramp, or else with the phase.
        """
        phase = self.phase(step)
        if phase != "prune":
            return float(phase == "retrain")
        return self.ramp(step) if on_ramp else (step - self.finetune) / max(1, self.prune - self.finetune - 1)

    def backbone_rate(self, step: int) -> float:
        """Return the factor of the backbone's learning rate: in each cycle a linear rise, then a fall."""
        if step < self.finetune:
            return self._cycle(step, self.finetune)
        start = min(self.prune, self.end - 1) if self.pipelined else self.finetune
        return self.second_peak * self._cycle(max(0, step - start), self.end - start)

    def _cycle(self, step: int, steps: int) -> float:
        rise = max(1, round(self.rise_share * steps))
        if self.decay == "noam":
            return float(min((step + 1) / rise, (rise / (step + 1)) ** 0.5))
        return min((step + 1) / rise, max(0.0, (steps - step) / max(1, steps - rise)))

    def gate_rate(self, step: int) -> float:
        """Return the factor of the learning rate of gates, which are frozen outside the prune phase."""
        return 1.0 if self.phase(step) == "prune" else 0.0
