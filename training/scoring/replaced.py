"""What takes the place of closed heads while a model is evaluated."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from torch import Tensor

from gates.hooks.replacement import mean_replacement, uniform_replacement
from training.scoring.constants import optimal_constants
from training.scoring.outputs import mean_outputs
from training.scoring.subject import Subject

Replacement = Literal["zero", "mean", "constants", "uniform"]


class Replacements:
    """What takes the place of closed heads of one dense model; mean outputs are gathered once."""

    def __init__(self) -> None:
        self._means: list[Tensor] | None = None

    def use(self, subject: Subject, replacement: Replacement, mask: Tensor) -> AbstractContextManager[None]:
        """A replacement for the length of a ``with`` block.

        Args:
            subject: with the dense weights.
            replacement: nothing, their mean output on training data, the constants with which the loss on training data is
                lowest, or what they would read with uniform attention.
            mask: 0/1 ``[gates]``, for which constants are sought.
        """
        if replacement == "zero":
            return nullcontext()
        if replacement == "uniform":
            return uniform_replacement(subject.backbone, subject.gates)
        if replacement == "constants":
            constants = optimal_constants(subject, mask.unsqueeze(0), steps=32)
            return mean_replacement(subject.gates, [of_site[0] for of_site in constants])
        if self._means is None:
            self._means = mean_outputs(subject)
        return mean_replacement(subject.gates, self._means)
