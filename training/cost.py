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


@dataclass
class Cost:
    """Filled in when the work is done.

    Args:
        seconds: wall time.
        peak_memory_mb: on a GPU the most memory its tensors took, on a Linux CPU the most the whole process took, elsewhere
            None.
    """

    seconds: float = 0.0
    peak_memory_mb: float | None = None

    def as_row(self) -> dict[str, Any]:
        return {"steps": 0, "seconds": round(self.seconds, 2), "peak_memory_mb": self.peak_memory_mb}


@contextmanager
def measured(device: torch.device) -> Iterator[Cost]:
    """Measure the work of a ``with`` block that computes on a device."""
    cost = Cost()
    _reset_peak(device)
    start = time.perf_counter()
    yield cost
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    cost.seconds = time.perf_counter() - start
    cost.peak_memory_mb = _peak(device)


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
