"""The cost of a piece of work: steps, passes through the model, wall time and peak memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gates.export.cost import wait_for
from gates.gating.head_gates import HeadGates
from training.runs import processes


class ExampleCounter:
    """Count the examples that pass forward through a model with gates, and those that a gradient can follow back.

    The counter hooks the gated attention modules. Each module is one part of a pass. Passes that end early, or that enter
    behind some layers, count in part. An example that a search repeats within a batch counts each time. A module that sees an
    example in several rows, such as windows of a picture, counts them as one. A probe within the model's own pass is no pass.

    Attributes:
        forward: The number of examples so far.
        backward: The number of examples whose outputs need a gradient.
        counts: Whether passes are counted at the moment.
    """

    def __init__(self, gates: HeadGates) -> None:
        self.forward = self.backward = 0.0
        self.counts = True
        self._rows: list[int | None] = []  # batch sizes of the model's running passes, outermost first
        self._rows_of_one: dict[int, float] = {}  # rows per example, by module
        modules = list(dict.fromkeys(site.module for site in gates.sites))
        self._part = 1 / len(modules)
        self._handles = [
            gates.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            gates.model.register_forward_hook(self._leave, always_call=True),
            *(module.register_forward_hook(self._count, with_kwargs=True) for module in modules),
        ]

    def stop(self) -> None:
        """Stop counting and remove the hooks."""
        self.counts = False
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExampleCounter:
        """Return a counter that does not count: a copy of the model, such as a teacher, has the hooks but is another model."""
        other = object.__new__(ExampleCounter)
        other._rows, other.counts = [], False
        return other

    def _enter(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._rows.append(_rows(args, kwargs))

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._rows:  # a pass may have been under way when counting began
            self._rows.pop()

    def _count(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        rows = _rows(args, kwargs)
        if not self.counts or rows is None or len(self._rows) > 1:
            return
        if self._rows and self._rows[0]:
            self._rows_of_one[id(module)] = rows / self._rows[0]
        examples = self._part * rows / self._rows_of_one.get(id(module), 1.0)
        self.forward += examples
        outputs = (output,) if isinstance(output, Tensor) else output or ()
        first = next((one for one in outputs if isinstance(one, Tensor)), None)
        if first is not None and first.requires_grad and torch.is_grad_enabled():
            self.backward += examples


def _rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Return the length of the first tensor of a call."""
    found = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()), None)
    return None if found is None else len(found)


STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # Linux: the peak memory of a process, and its reset


@dataclass(frozen=True)
class Cost:
    """The cost of a piece of work.

    Args:
        peak_memory_mb: The peak of the tensors on a GPU, or of the whole process on Linux. None elsewhere.
        forward_examples: The number of examples that passed through the model; a repeated example counts each time.
        backward_examples: The number of examples that a gradient could follow back.
    """

    seconds: float = 0.0
    peak_memory_mb: float | None = None
    steps: int = 0
    forward_examples: float = 0.0
    backward_examples: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cost:
        """Return the cost in a row of a table or the result of an experiment."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})

    @property
    def passes(self) -> float:
        """The cost in passes of one example. A backward pass counts as two, since it computes about twice as much."""
        return self.forward_examples + 2 * self.backward_examples

    def then(self, later: Cost) -> Cost:
        """Return the cost of this work and later work together."""
        peaks = [peak for peak in (self.peak_memory_mb, later.peak_memory_mb) if peak is not None]
        return Cost(
            self.seconds + later.seconds,
            max(peaks, default=None),
            self.steps + later.steps,
            self.forward_examples + later.forward_examples,
            self.backward_examples + later.backward_examples,
        )

    def with_teacher(self) -> Cost:
        """Return the cost with a teacher's pass for every example that was trained on."""
        return replace(self, forward_examples=self.forward_examples + self.backward_examples)

    def as_row(self) -> dict[str, Any]:
        """Return the columns of a table."""
        return {
            "steps": self.steps,
            "seconds": round(self.seconds, 2),
            "peak_memory_mb": self.peak_memory_mb,
            "forward_examples": round(self.forward_examples),
            "backward_examples": round(self.backward_examples),
        }


NO_COST = Cost()


class Meter:
    """Measure work on a device until :meth:`stop`.

    Args:
        gates: The gates of the model whose passes are counted, in this process; every other process counts as many. Without
            gates time and memory are measured alone.
        before: The cost of earlier work, which is added.
    """

    def __init__(self, device: torch.device, gates: HeadGates | None, before: Cost = NO_COST) -> None:
        self.device, self.before = device, before
        self.stopped: Cost | None = None
        self.counter = None if gates is None else ExampleCounter(gates)
        _reset_peak(device)
        self.start = time.perf_counter()

    @property
    def cost(self) -> Cost:
        """The cost so far, or of the whole work once the meter is stopped."""
        return self.stopped or self._read()

    def pause(self, paused: bool) -> None:
        """Stop or continue to count examples. The time is not stopped."""
        if self.counter is not None:
            self.counter.counts = not paused

    def stop(self) -> None:
        """End the measurement."""
        self.stopped = self._read()
        if self.counter is not None:
            self.counter.stop()

    def as_row(self) -> dict[str, Any]:
        return self.cost.as_row()

    def _read(self) -> Cost:
        wait_for(self.device)
        seconds, peak = time.perf_counter() - self.start, _peak(self.device)
        counts = (0.0, 0.0) if self.counter is None else (self.counter.forward, self.counter.backward)
        return self.before.then(Cost(seconds, peak, 0, *(count * processes.world_size() for count in counts)))


@contextmanager
def measured(device: torch.device, gates: HeadGates | None, before: Cost = NO_COST) -> Iterator[Meter]:
    """Measure the work of a ``with`` block; see :class:`Meter`."""
    meter = Meter(device, gates, before)
    try:
        yield meter
    finally:
        meter.stop()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # otherwise PyTorch refuses to reset the peak before the first tensor
        torch.cuda.reset_peak_memory_stats(device)
    elif RESET.exists():
        try:
            RESET.write_text("5")
        except OSError:
            return  # some containers forbid it; the peak is then that of the process so far


def _peak(device: torch.device) -> float | None:
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    if not STATUS.exists():
        return None
    peaks = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return round(int(peaks[0]) / 1024, 1) if peaks else None
