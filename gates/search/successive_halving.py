"""Masks race on parts of the calibration data, and few come to be judged on all of it (successive halving; Jamieson and
Talwalkar 2016)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Loss = Callable[[Tensor, float], float]
"""Of a mask on a share of the calibration data, above 0 and at most 1; the same examples for the same share."""
ROUNDS = ((1 / 8, 8), (1 / 4, 4))
"""Shares of the data on which masks are compared, and how many stay after each."""


class Metered:
    """A loss that counts the passes over the data that it takes."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.passes = loss, 0.0

    def __call__(self, mask: Tensor, share: float) -> float:
        self.passes += share
        return self.loss(mask, share)


def passes_of(count: int) -> float:
    """Passes over the data of a race of so many masks, and of one more look at all of it for each that is in front."""
    passes = 0.0
    for share, survivors in ROUNDS:
        if count > survivors:
            passes, count = passes + share * count, survivors
    return passes + count


def race(masks: Sequence[Tensor], loss: Loss) -> list[int]:
    """Numbers of the masks in front after all rounds, best first; a round that nobody would leave is not run."""
    running = list(range(len(masks)))
    for share, survivors in ROUNDS:
        if len(running) > survivors:
            values = {number: loss(masks[number], share) for number in running}
            running = sorted(running, key=values.__getitem__)[:survivors]
    return running
