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
        finetune, prune, end: optimiser steps after which the phases finetune, prune and retrain end.
        ramp_share: share of the prune phase over which the target or the price goes to its final value.
        rise_share: share of a cycle's steps over which the backbone's learning rate rises.
        decay: how the rate falls after its rise: ``linear`` to 0 at the cycle's end, or as in ``noam``, the schedule of
            Vaswani et al. 2017, with the inverse square root of the step.
        second_peak: the rate has one cycle over fine-tuning, so that the dense model is trained to its end, and a second one,
            whose peak is this times the first, over the rest.
        rests: whether the backbone rests in the prune phase, so that the second cycle begins with the retrain phase.
    """

    finetune: int = 0
    prune: int = 0
    end: int = 0
    ramp_share: float = 1.0
    rise_share: float = 0.0
    decay: Decay = "linear"
    second_peak: float = 1.0
    rests: bool = False

    @classmethod
    def of_epochs(
        cls,
        steps: int,
        *,
        finetune: float,
        prune: float,
        retrain: float,
        ramp_share: float,
        rise_share: float,
        decay: Decay = "linear",
        second_peak: float = 1.0,
        rests: bool = False,
    ) -> Schedule:
        """Divide ``steps`` among phases in proportion to their length in epochs; the prune phase has at least one, unless it
        has no length at all."""
        epochs = finetune + prune + retrain
        first = min(steps - (1 if prune > 0 else 0), round(steps * finetune / epochs))
        second = max(1 if prune > 0 else 0, round(steps * prune / epochs))
        return cls(first, min(steps, first + second), steps, ramp_share, rise_share, decay, second_peak, rests)

    @classmethod
    def of_options(cls, steps: int, options: PrunerOptions, *, rests: bool = False) -> Schedule:
        """The schedule of a run of so many optimiser steps; ``rests`` as in the class."""
        second, first = options.prune_learning_rate, options.learning_rate
        return cls.of_epochs(
            steps,
            finetune=options.finetune,
            prune=options.prune,
            retrain=options.retrain,
            ramp_share=options.ramp,
            rise_share=options.lr_warm_up,
            decay=options.lr_decay,
            second_peak=second / first if second is not None and first else 1.0,
            rests=rests,
        )

    def shortened(self, start: int, steps: int) -> Schedule:
        """The same to step ``start``, after which only ``steps`` follow; the prune phase keeps its share of them.
        A cycle of the learning rate that has begun before is squeezed as a whole."""
        if start >= self.prune:
            return replace(self, end=start + steps)
        share = (self.prune - start) / (self.end - start)
        return replace(self, prune=start + round(share * steps), end=start + steps)

    def phase(self, step: int) -> Phase:
        return "finetune" if step < self.finetune else "prune" if step < self.prune else "retrain"

    def ramp(self, step: int) -> float:
        """How far the target or the price has gone, 0 to 1; 0 outside the prune phase."""
        if self.phase(step) != "prune":
            return 0.0
        return ramped(step - self.finetune + 1, self.ramp_share * (self.prune - self.finetune))

    def progress(self, step: int, *, on_ramp: bool) -> float:
        """How far pruning has come, 0 before the prune phase and 1 after it.

        Args:
            step: of the optimiser.
            on_ramp: whether it ends with the ramp, or else with the phase.
        """
        phase = self.phase(step)
        if phase != "prune":
            return float(phase == "retrain")
        return self.ramp(step) if on_ramp else (step - self.finetune) / max(1, self.prune - self.finetune - 1)

    def backbone_rate(self, step: int) -> float:
        """Factor of the backbone's learning rate: in each cycle a linear rise, then a fall."""
        if step < self.finetune:
            return self._cycle(step, self.finetune)
        start = min(self.prune, self.end - 1) if self.rests else self.finetune
        return self.second_peak * self._cycle(max(0, step - start), self.end - start)

    def _cycle(self, step: int, steps: int) -> float:
        rise = max(1, round(self.rise_share * steps))
        if self.decay == "noam":
            return float(min((step + 1) / rise, (rise / (step + 1)) ** 0.5))
        return min((step + 1) / rise, max(0.0, (steps - step) / max(1, steps - rise)))

    def gate_rate(self, step: int) -> float:
        """Factor of the learning rate of gates, which rest outside the prune phase."""
        return 1.0 if self.phase(step) == "prune" else 0.0
