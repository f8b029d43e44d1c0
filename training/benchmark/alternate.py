"""Alternating measurement: variants take turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from training.runs import progress

Work = Callable[[], object]
Stopwatch = Callable[[Work], float]
LEAST = 5
"""Turns that are measured however long they take, so that there are quartiles."""


@dataclass(frozen=True)
class Effort:
    """How long variants are measured.

    Args:
        turns: timed calls of each variant at most.
        warm_up: calls of each before these, whose times are thrown away.
        seconds: no turn begins later than this after the first timed one, but for the first :data:`LEAST`.
        processor_time: whether the time that a CPU worked for this process counts, in place of the time that went by.
    """

    turns: int = 30
    warm_up: int = 2
    seconds: float = 10.0
    processor_time: bool = False


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles.

    >>> Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    Spread(median=3.0, low=2.0, high=4.0)
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))


def as_cell(spread: Spread | None) -> dict[str, float] | None:
    """A spread as a table keeps it."""
    return None if spread is None else asdict(spread)


@dataclass(frozen=True)
class Times:
    """What was measured.

    Args:
        of: by variant, milliseconds of each turn.
    """

    of: Mapping[str, Sequence[float]]

    def milliseconds(self, variant: str) -> Spread:
        """Of one call of a variant."""
        return Spread.of(self.of[variant])

    def ratio(self, variant: str, over: str) -> Spread:
        """How many times as long as another a variant takes, from the ratios within each turn: other work on the machine
        changes neighbours alike."""
        return Spread.of([a / b for a, b in zip(self.of[variant], self.of[over], strict=True)])

    def difference(self, variant: str, less: str) -> Spread:
        """How many milliseconds longer than another a variant takes, from the differences within each turn."""
        return Spread.of([a - b for a, b in zip(self.of[variant], self.of[less], strict=True)])


def order_of(names: Sequence[str], turn: int) -> list[str]:
    """The order of the variants in a turn, which changes with every turn, so that none always follows the same one.

    >>> order_of(["a", "b"], 0), order_of(["a", "b"], 1)
    (['a', 'b'], ['b', 'a'])
    """
    return list(names) if turn % 2 == 0 else list(names)[::-1]


def alternate(
    variants: Mapping[str, Work],
    device: torch.device,
    effort: Effort,
    *,
    stopwatch: Stopwatch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Times:
    """Time of each variant, in turn.

    Args:
        variants: pieces of work by name.
        device: that computes.
        effort: how long.
        stopwatch: milliseconds of a piece of work; the device's own by default.
        clock: seconds, by which ``effort.seconds`` is counted.
    """
    measure = stopwatch or stopwatch_of(device, processor_time=effort.processor_time)
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(effort.warm_up):
        for name in order_of(list(variants), turn):
            variants[name]()
    start = clock()
    for turn in range(effort.turns):
        if turn >= LEAST and clock() - start > effort.seconds:
            break
        for name in order_of(list(variants), turn):
            taken[name].append(measure(variants[name]))
    return Times(taken)


def alternate_shown(
    what: str, variants: Mapping[str, Work], device: torch.device, effort: Effort, *, stopwatch: Stopwatch | None = None
) -> Times:
    """:func:`alternate`, and a line about what is measured."""
    with progress.stage(f"measuring {what}"):
        return alternate(variants, device, effort, stopwatch=stopwatch)


def stopwatch_of(device: torch.device, *, processor_time: bool = False) -> Stopwatch:
    """Milliseconds of a piece of work: by events on the stream of a GPU; elsewhere by the clock, or the time that processors
    worked for this process, all threads together."""
    if device.type == "cuda":
        return partial(_by_events, device)
    return stopwatch_by(time.process_time if processor_time else time.perf_counter)


def stopwatch_by(clock: Callable[[], float]) -> Stopwatch:
    """Milliseconds of a piece of work by a clock, in seconds."""

    def by_clock(work: Work) -> float:
        start = clock()
        work()
        return 1000 * (clock() - start)

    return by_clock


def _by_events(device: torch.device, work: Work) -> float:
    with torch.cuda.device(device):  # events belong to the current device
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end))
