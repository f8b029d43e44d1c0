"""What a piece of work cost: wall time and peak memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Where Linux keeps the peak of a process's memory, and lets it be reset."""


@dataclass(frozen=True)
class Cost:
    """What a piece of work cost.

    Args:
        seconds: wall time.
        peak_memory_mb: on a GPU the most memory its tensors took, on a Linux CPU the most the whole process took, elsewhere
            None.
    """

    seconds: float = 0.0
    peak_memory_mb: float | None = None

    def then(self, later: Cost) -> Cost:
        """The cost of this work and later work together."""
        peaks = [peak for peak in (self.peak_memory_mb, later.peak_memory_mb) if peak is not None]
        return Cost(self.seconds + later.seconds, max(peaks, default=None))

    def as_row(self) -> dict[str, Any]:
        return {"steps": 0, "seconds": round(self.seconds, 2), "peak_memory_mb": self.peak_memory_mb}


NOTHING = Cost()


class Meter:
    """Measures work on a device from now on until it is stopped.

    Args:
        device: that computes.
        before: cost of earlier work, which counts too.
    """

    def __init__(self, device: torch.device, before: Cost = NOTHING) -> None:
        self.device, self.before = device, before
        self.stopped: Cost | None = None
        _reset_peak(device)
        self.start = time.perf_counter()

    @property
    def cost(self) -> Cost:
        """So far; once it is stopped, of the whole work."""
        return self.stopped or self._read()

    def stop(self) -> None:
        self.stopped = self._read()

    def as_row(self) -> dict[str, Any]:
        return self.cost.as_row()

    def _read(self) -> Cost:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.before.then(Cost(time.perf_counter() - self.start, _peak(self.device)))


@contextmanager
def measured(device: torch.device, before: Cost = NOTHING) -> Iterator[Meter]:
    """Measure the work of a ``with`` block that computes on a device; see :class:`Meter`."""
    meter = Meter(device, before)
    yield meter
    meter.stop()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif RESET.exists():
        try:
            RESET.write_text("5")
        except OSError:  # not allowed in every container; the peak is then that of the process so far
            return


def _peak(device: torch.device) -> float | None:
    """In MB."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    if not STATUS.exists():
        return None
    peaks = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return round(int(peaks[0]) / 1024, 1) if peaks else None
