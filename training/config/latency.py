"""What a latency table is measured with, beside the run that it is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.config.checks import at_least_1
from training.config.paths import LocalPath


@dataclass(frozen=True)
class LatencyOptions:
    """What is measured.

    Args:
        output: file to write, in JSON.
        batch_size: examples at a time (default: those of the first batch of the test split).
        length: tokens of each example (default: those of that batch).
    """

    output: LocalPath = field(default=LocalPath("latency.json"))
    batch_size: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        at_least_1(self, "batch_size", "length", prefix="--")
