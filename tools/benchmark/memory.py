"""Measure the peak memory of a job; on a CPU in a separate process, because PyTorch keeps memory that an earlier job freed."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

import torch

from tools.benchmark.setting import Row, Setting, cell
from training.latency import Spread, order_of
from training.runs import progress
from training.runs.cost import measured

Prepare = Callable[..., Callable[[], object]]
NOISE = 50.0
"""The MB below which two peaks are not compared: libraries touch as much of themselves while they work."""


def peak_megabytes(what: str, setting: Setting, prepare: Prepare, *arguments: Any) -> float | None:
    """Measure the most MB that the work of ``prepare(*arguments)`` takes; None if the system does not tell or ends the process.

    On a GPU it is the memory of tensors. On a CPU under Linux it is the growth of the process since the libraries were loaded,
    so that weights count and Python does not.
    """
    if setting.device == "cuda":  # PyTorch counts the tensors there, without freed memory
        return peak_here(setting.on, setting.threads, prepare, arguments)
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["tools.benchmark.setting"])
    with progress.stage(f"measuring memory of {what}"), ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(peak_here, setting.on, setting.threads, prepare, arguments).result()
        except BrokenProcessPool:
            return None


def peaks_in_turn(
    what: str, setting: Setting, turns: int, variants: Mapping[str, tuple[Prepare, tuple[Any, ...]]]
) -> dict[str, list[float | None]]:
    """Call :func:`peak_megabytes` for each variant, given as ``prepare`` with its arguments, in an order that changes."""
    peaks: dict[str, list[float | None]] = {name: [] for name in variants}
    for turn in range(turns):
        for name in order_of(list(variants), turn):
            prepare, arguments = variants[name]
            peaks[name].append(peak_megabytes(what, setting, prepare, *arguments))
    return peaks


def memory_columns(peaks: Mapping[str, Sequence[float | None]], one: str, other: str) -> Row:
    """Return the peaks of all variants, and the ratio of two of them, as columns."""
    known = {name: [peak for peak in found if peak is not None] for name, found in peaks.items()}
    row = {f"{name}_mb": cell(Spread.of(found) if found else None) for name, found in known.items()}
    return row | {"memory_ratio": cell(ratio(peaks[one], peaks[other]))}


def ratio(ones: Sequence[float | None], others: Sequence[float | None]) -> Spread | None:
    """Return the ratios of the peaks of each turn; None if all are unknown or too small."""
    pairs = [(one, other) for one, other in zip(ones, others, strict=True) if one is not None and other is not None]
    found = [one / other for one, other in pairs if min(one, other) >= NOISE]
    return Spread.of(found) if found else None


def peak_here(device: torch.device, threads: int, prepare: Prepare, arguments: Sequence[Any]) -> float | None:
    torch.set_num_threads(threads)
    gc.collect()  # gated models of earlier work are cycles; freed later, they would count against this work
    with measured(device, None) as before:
        pass
    work = prepare(*arguments)
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with measured(device, None) as meter:
        for _ in range(3):  # an optimiser makes its moments in the first step
            work()
    peak, start = meter.cost.peak_memory_mb, before.cost.peak_memory_mb
    return None if peak is None or start is None else peak - start
