"""What a piece of work cost: steps, passes through the model, wall time and peak memory."""

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

# How many examples pass through a model, whoever runs it: training, scores, searches, refits.


class ExampleCounter:
    """Counts the examples that pass forward through a model with gates, and those of them that a gradient can follow back.

    It counts at the gated attention modules, each of which is one part of a pass. So passes that end early, or that enter the
    model behind some of its layers, count in part, and examples that a search repeats within a batch count as often as they are
    there. Modules that see an example in several rows, such as windows of a picture, count them as one example. What gates ask
    of a model within its own pass, when they meet it first, is no pass.

    Args:
        gates: of the model.

    Attributes:
        forward: examples so far.
        backward: those among them whose outputs need a gradient.
        counts: whether passes count now.
    """

    def __init__(self, gates: HeadGates) -> None:
        self.forward = self.backward = 0.0
        self.counts = True
        self._rows: list[int | None] = []  # of the batches of the whole model's passes that are under way, each within the last
        self._rows_of_one: dict[int, float] = {}  # of each module
        modules = list(dict.fromkeys(site.module for site in gates.sites))
        self._part = 1 / len(modules)
        self._handles = [
            gates.model.register_forward_pre_hook(self._enter, with_kwargs=True),
            gates.model.register_forward_hook(self._leave, always_call=True),
            *(module.register_forward_hook(self._count, with_kwargs=True) for module in modules),
        ]

    def stop(self) -> None:
        """Count no more."""
        self.counts = False
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExampleCounter:
        """One that does not count, since a copy of the model, such as a teacher, has the hooks but is another model."""
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
    """The length of the first tensor of a call."""
    found = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim()), None)
    return None if found is None else len(found)


STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Where Linux keeps the peak of a process's memory, and lets it be reset."""


@dataclass(frozen=True)
class Cost:
    """What a piece of work cost.

    Args:
        seconds: wall time.
        peak_memory_mb: on a GPU the most memory its tensors took, on a Linux CPU the most the whole process took, elsewhere
            None.
        steps: of an optimiser.
        forward_examples: that passed through the model, a repeated one as often as it did; None where nobody counted.
        backward_examples: that a gradient could follow back.
    """

    seconds: float = 0.0
    peak_memory_mb: float | None = None
    steps: int = 0
    forward_examples: float | None = 0.0
    backward_examples: float | None = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Cost:
        """The cost that a row of a table or the result of an experiment tells; earlier versions counted no examples."""
        told = {"forward_examples": None, "backward_examples": None} | dict(row)
        return cls(**{field.name: told[field.name] for field in fields(cls) if field.name in told})

    @property
    def passes(self) -> float | None:
        """Passes of an example that it comes to, where backward counts as two forward ones, as it computes about twice as much;
        None where nobody counted."""
        if self.forward_examples is None or self.backward_examples is None:
            return None
        return self.forward_examples + 2 * self.backward_examples

    def then(self, later: Cost) -> Cost:
        """The cost of this work and later work together."""
        peaks = [peak for peak in (self.peak_memory_mb, later.peak_memory_mb) if peak is not None]
        return Cost(
            self.seconds + later.seconds,
            max(peaks, default=None),
            self.steps + later.steps,
            _sum(self.forward_examples, later.forward_examples),
            _sum(self.backward_examples, later.backward_examples),
        )

    def with_teacher(self) -> Cost:
        """With a teacher's pass for every example that was trained on."""
        return replace(self, forward_examples=_sum(self.forward_examples, self.backward_examples))

    def as_row(self) -> dict[str, Any]:
        """Its columns."""
        row = {"steps": self.steps, "seconds": round(self.seconds, 2), "peak_memory_mb": self.peak_memory_mb}
        counted = {"forward_examples": self.forward_examples, "backward_examples": self.backward_examples}
        return row | {name: None if count is None else round(count) for name, count in counted.items()}


NO_COST = Cost()


class Meter:
    """Measures work on a device from now on until it is stopped.

    Args:
        device: that computes.
        gates: of the model whose passes are counted, in this process and, with as many, in every other one; None where nobody
            counts.
        before: cost of earlier work, which counts too.
    """

    def __init__(self, device: torch.device, gates: HeadGates | None, before: Cost = NO_COST) -> None:
        self.device, self.before = device, before
        self.stopped: Cost | None = None
        self.counter = None if gates is None else ExampleCounter(gates)
        _reset_peak(device)
        self.start = time.perf_counter()

    @property
    def cost(self) -> Cost:
        """So far; once it is stopped, of the whole work."""
        return self.stopped or self._read()

    def pause(self, paused: bool) -> None:
        """Count no examples for a while, or count them again; time goes on."""
        if self.counter is not None:
            self.counter.counts = not paused

    def stop(self) -> None:
        """Measure no more."""
        self.stopped = self._read()
        if self.counter is not None:
            self.counter.stop()

    def as_row(self) -> dict[str, Any]:
        return self.cost.as_row()

    def _read(self) -> Cost:
        wait_for(self.device)
        seconds, peak, counter = time.perf_counter() - self.start, _peak(self.device), self.counter
        if counter is None:
            return self.before.then(Cost(seconds, peak, forward_examples=None, backward_examples=None))
        passed = (count * processes.world_size() for count in (counter.forward, counter.backward))
        return self.before.then(Cost(seconds, peak, 0, *passed))


@contextmanager
def measured(device: torch.device, gates: HeadGates | None, before: Cost = NO_COST) -> Iterator[Meter]:
    """Measure the work of a ``with`` block that computes on a device; see :class:`Meter`."""
    meter = Meter(device, gates, before)
    try:
        yield meter
    finally:
        meter.stop()


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.init()  # before the first tensor is there, PyTorch knows no device whose peak it could reset
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
