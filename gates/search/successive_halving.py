"""Compare masks on parts of the calibration data, and keep few for all of it (successive halving; Jamieson and Talwalkar
2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Loss = Callable[[Tensor, float], float]
"""A function from a mask and a share of the calibration data, above 0 and at most 1, to the loss. Each share always has the
same examples."""
ROUNDS = ((1 / 8, 8), (1 / 4, 4))
"""The share of the data and the number of survivors of each round."""


class Metered:
    """Count the passes over the data that a loss takes."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.passes = loss, 0.0

    def __call__(self, mask: Tensor, share: float) -> float:
        self.passes += share
        return self.loss(mask, share)


def passes_of(count: int) -> float:
    """Return the passes over the data for a race of ``count`` masks and one evaluation of each survivor on all data."""
    passes = 0.0
    for share, survivors in ROUNDS:
        if count > survivors:
            passes, count = passes + share * count, survivors
    return passes + count


def race(masks: Sequence[Tensor], loss: Loss) -> list[int]:
    """Return the numbers of the surviving masks, best first. A round without a loser is skipped."""
    running = list(range(len(masks)))
    for share, survivors in ROUNDS:
        if len(running) > survivors:
            values = {number: loss(masks[number], share) for number in running}
            running = sorted(running, key=values.__getitem__)[:survivors]
    return running
