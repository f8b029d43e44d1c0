"""Peak memory of a piece of work, in a process of its own: what an earlier variant took and gave back would hide what a later
one takes, since PyTorch and the system's allocator keep it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch

from training.benchmark.alternate import Spread, order_of
from training.runs import progress
from training.runs.cost import measured

STATUS = Path("/proc/self/status")
Prepare = Callable[..., Callable[[], object]]
CALLS = 3
"""Of the work: an optimiser makes its moments in the first step, and they are there in the second."""
NOISE = 50.0
"""MB, below which two peaks are not compared: libraries touch that much of themselves while they work."""


def peak_megabytes(what: str, device: torch.device, threads: int, prepare: Prepare, *arguments: Any) -> float | None:
    """Most memory that a piece of work takes beside Python and its libraries, in MB; None where the system does not tell it, or
    ends the process for it.

    On a GPU it is that of tensors. On a CPU under Linux it is the growth of the process since the libraries were loaded, so
    that weights count and the interpreter does not. What it took to prepare the work does not count, but for what is left.

    Args:
        what: is measured, for the user.
        device: that computes.
        threads: of the CPU.
        prepare: function at the top of a module, which makes the work.
        arguments: of that function, which can be pickled.
    """
    with progress.stage(f"measuring memory of {what}"), ProcessPoolExecutor(1, mp_context=_processes()) as pool:
        try:
            return pool.submit(_peak, str(device), threads, prepare, arguments).result()
        except BrokenProcessPool:
            return None


def peaks_in_turn(
    what: str, device: torch.device, threads: int, turns: int, variants: Mapping[str, tuple[Prepare, tuple[Any, ...]]]
) -> dict[str, list[float | None]]:
    """:func:`peak_megabytes` of several pieces of work, as often as there are turns, in an order that changes with every turn.

    Args:
        what, device, threads: see :func:`peak_megabytes`.
        turns: processes for each variant.
        variants: by name, what prepares each and with which arguments.
    """
    peaks: dict[str, list[float | None]] = {name: [] for name in variants}
    for turn in range(turns):
        for name in order_of(list(variants), turn):
            prepare, arguments = variants[name]
            peaks[name].append(peak_megabytes(what, device, threads, prepare, *arguments))
    return peaks


def spread_of(peaks: Sequence[float | None]) -> Spread | None:
    """Of the peaks that are known."""
    known = [peak for peak in peaks if peak is not None]
    return Spread.of(known) if known else None


def ratio(ones: Sequence[float | None], others: Sequence[float | None]) -> Spread | None:
    """Of the peaks of each turn; None where none are known, or all are too small to be told from noise."""
    pairs = [(one, other) for one, other in zip(ones, others, strict=True) if one is not None and other is not None]
    found = [one / other for one, other in pairs if min(one, other) >= NOISE]
    return Spread.of(found) if found else None


def _processes() -> BaseContext:
    """How processes are begun: with the libraries loaded and nothing else, where the system can."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training.benchmark.models"])
    return context


def _peak(device: str, threads: int, prepare: Prepare, arguments: tuple[Any, ...]) -> float | None:
    torch.set_num_threads(threads)
    before = 0.0 if torch.device(device).type == "cuda" else _resident_megabytes()
    work = prepare(*arguments)
    _give_back()
    with measured(torch.device(device), None) as meter:
        for _ in range(CALLS):
            work()
    peak = meter.cost.peak_memory_mb
    return None if peak is None or before is None else peak - before


def _resident_megabytes() -> float | None:
    """Memory of this process now, in MB; None where the system does not tell it as Linux does."""
    if not STATUS.exists():
        return None
    sizes = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:")]
    return int(sizes[0]) / 1024 if sizes else None


def _give_back() -> None:
    """To the system what is free, where its allocator is asked for that."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
