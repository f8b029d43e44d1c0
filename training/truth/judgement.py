"""Masks against the truth: how many necessary functions they keep, and how many heads they keep in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Functions = Sequence[Sequence[int]]
"""For each necessary function the gates that perform it, any one of which is enough."""


@dataclass(frozen=True)
class Judgement:
    """What a mask keeps.

    Args:
        needed: necessary functions.
        kept: heads.
        covered: necessary functions of which at least one head is kept.
    """

    needed: int
    kept: int
    covered: int

    @property
    def recall(self) -> float:
        """Share of the necessary functions that are kept."""
        return self.covered / self.needed

    @property
    def precision(self) -> float:
        """Share of the kept heads that are needed; of interchangeable heads the second is not."""
        return self.covered / self.kept if self.kept else 0.0

    @property
    def exact(self) -> bool:
        """Whether it keeps every necessary function once and nothing else."""
        return self.needed == self.covered == self.kept


def judged(mask: Tensor, functions: Functions) -> Judgement:
    """A 0/1 mask ``[gates]`` against the necessary functions, each with heads of its own."""
    covered = sum(any(bool(mask[gate] > 0) for gate in gates) for gates in functions)
    return Judgement(len(functions), int((mask > 0).sum()), covered)
