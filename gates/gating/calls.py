"""Tell which call of a model an attention module runs for, so that a draw of the gates belongs to one call.

Under activation checkpointing a layer runs a second time during the backward pass, when the model may have been called again.
PyTorch numbers the nodes of the autograd graph in the order in which they are made. The
number of the node in the backward pass lies between the first and the last number of its call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr

from gates.attention.examples import ExampleAxis
from gates.attention.scaling import spread_to_columns
from gates.errors import GateError


@dataclass(frozen=True, eq=False)
class Part:
    """A module that is called, and its path in the model, which is empty for the whole model."""

    name: str
    module: nn.Module

    def holds(self, other: Part) -> bool:
        """Return whether another module is inside this one."""
        by_name = other.name != self.name and other.name.startswith(f"{self.name}." if self.name else "")
        return by_name or (  # a module may have several paths
            other.module is not self.module and any(part is other.module for part in self.module.modules())
        )


@dataclass(eq=False)
class Call:
    """One call of a model, or of a part of it that is called alone.

    Args:
        values: The gate values, ``[gates]`` or ``[examples, gates]``; None if all are one.
        spread: The function from the values to those of the columns of all sites; see
            :func:`gates.attention.scaling.spread_to_columns`.
        widths: The number of columns of each site.
        inputs: The positional and keyword arguments while the call runs; None afterwards.
        first, last: The numbers of its autograd nodes, ``first <= number < last``; ``last`` is None while it runs.
        drew: Whether the values were computed in the call, with a graph. Others are given or fixed.
        without_graph: The sites that ran under ``torch.no_grad``.
    """

    part: Part
    values: Tensor | None
    spread: Callable[..., Tensor]
    widths: list[int]
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None
    thread: threading.Thread | None = None
    first: int = 0
    last: int | None = None
    drew: bool = False
    without_graph: set[int] = field(default_factory=set)
    columns: Tensor | None = None
    of_sites: dict[Hashable, Sequence[Tensor]] = field(default_factory=dict)

    def at(self, site: int, heads: Tensor, axis: ExampleAxis | None) -> Tensor | None:
        """Return the gate of each column of a site, ``[columns]`` or broadcastable to its heads, or None if they are one.

        The gates of examples are spread to the rows of all sites at once, in the dtype of the heads.

        Reentrant checkpointing is an error. It differentiates each layer separately, and the shared graph of the draw is freed
        after the first.

        Args:
            heads: The heads of the site, ``[..., columns]``.
            axis: The axis of the examples in the heads; None if all rows have the same gates.
        """
        if self.values is None:
            return None
        if not torch.compiler.is_compiling() and self.values.requires_grad:
            if not torch.is_grad_enabled():
                self.without_graph.add(site)
            elif self.last is not None and site in self.without_graph:
                raise GateError(
                    "gates cannot be trained under reentrant activation checkpointing; give it use_reentrant=False, as in "
                    "model.gradient_checkpointing_enable({'use_reentrant': False})"
                )
        known = {} if torch.compiler.is_compiling() else self.of_sites
        key = torch.is_grad_enabled(), None if axis is None else (axis, heads.dim(), heads.dtype)
        if key not in known:
            columns = self.columns
            if axis is not None:
                folded = axis.folded(self.values)
                columns = self.spread(folded, rows=axis.sizes(len(folded), heads.dim()), dtype=heads.dtype)
            elif columns is None:  # the call has ended, and its layer is recomputed
                columns = self.spread(self.values)
            known[key] = columns.split(self.widths, dim=-1)
        return known[key][site]


class Calls:
    """The running calls of each thread, and the finished calls that can still be differentiated.

    A thread has a stack of its running modules, each with its call. A part inside a call belongs to the same call. Compiled
    code has one call for all threads, since the compiler cannot trace the thread.

    Args:
        sizes: The number of gates of each site.
        columns: The number of columns of its heads.
    """

    def __init__(self, sizes: Sequence[int], columns: Sequence[int]) -> None:
        self._spread = partial(spread_to_columns, sizes=list(sizes), columns=list(columns))
        self._compiled: Call | None = None
        self._running: dict[int, list[tuple[Part, Call]]] = {}
        self._finished: WeakSet[Call] = WeakSet()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Calls], tuple[list[int], list[int]]]:
        return Calls, (self._spread.keywords["sizes"], self._spread.keywords["columns"])  # a copy of the gates has had no calls

    def running(self) -> Call | None:
        """Return the call that this thread is in; None outside of calls."""
        if torch.compiler.is_compiling():
            return self._compiled
        stack = self._running.get(threading.get_ident())
        return stack[-1][1] if stack else None

    def begin(self, part: Part, values: Callable[[], Tensor | None], inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Begin a call, unless a call runs around it already. A part that is recomputed continues its own call. ``values``
        returns the gate values of a new call, ``[gates]`` or ``[examples, gates]``."""
        if torch.compiler.is_compiling():
            if self._compiled is None or not self._compiled.part.holds(part):
                self._compiled = self._begun(part, values(), inputs)
            return
        stack = self._running.setdefault(threading.get_ident(), [])
        if stack and not stack[-1][0].holds(part):
            stack[:] = _still_running(stack, part)
        if stack and stack[-1][1].part.holds(part) and all(own.module is not part.module for own, _ in stack):
            stack.append((part, stack[-1][1]))
            return
        first, call = _get_sequence_nr(), self._recomputed()
        if call is None or (call.part.module is part.module and call.drew):  # a draw that is recomputed is made again
            flat = values()
            drew = flat is not None and flat.grad_fn is not None and flat.grad_fn._sequence_nr() >= first
            if drew and is_backward():
                self._check_repeated(part, flat)  # type: ignore[arg-type]
            call = self._begun(part, flat, inputs, thread=threading.current_thread(), first=first, drew=drew)
            if drew:
                flat.register_hook(partial(_keep, call))  # type: ignore[union-attr]
                self._compiled = call  # for parts that are compiled alone
        stack.append((part, call))

    def end(self, part: Part, output: Any) -> None:
        """End the call of a module; its values stay for as long as its output or its draw can be differentiated."""
        if torch.compiler.is_compiling():
            if self._compiled is not None and self._compiled.part.name == part.name:
                self._compiled = None
            return
        stack = self._running.get(threading.get_ident(), [])
        if all(own.module is not part.module for own, _ in stack):
            return
        while (last := stack.pop())[0].module is not part.module:
            pass
        if not stack:
            del self._running[threading.get_ident()]
        call = last[1]
        if call.part.module is not part.module or call.last is not None:
            return
        self._compiled, call.inputs, call.last = None, None, _get_sequence_nr()
        with self._lock:
            self._finished.add(call)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(_keep, call))  # the graph of the output owns the call
        if call.drew and call.values is not None:  # the graph of the draw owns the call, so the call may not own the graph
            call.values, call.columns = call.values.detach().requires_grad_(), None
            call.of_sites.clear()

    def _check_repeated(self, part: Part, draw: Tensor) -> None:
        """Raise unless the draw of a model that is recomputed is that of a call which can still be differentiated."""
        with self._lock:
            calls = [call for call in self._finished if call.drew and call.part.module is part.module]
        draws = [call.values for call in calls if call.values is not None]
        if draws and not any(torch.equal(one, draw) for one in draws):
            raise GateError(
                "the gated model is recomputed in a backward pass with another draw; leave preserve_rng_state=True, or "
                "checkpoint its layers, as model.gradient_checkpointing_enable({'use_reentrant': False}) does"
            )

    def _begun(self, part: Part, values: Tensor | None, inputs: Any, **more: Any) -> Call:
        """Return a new call, whose gates are spread to the columns of all sites at once, unless examples have their own."""
        columns = self._spread(values) if values is not None and values.dim() == 1 else None
        return Call(part, values, self._spread, self._spread.keywords["columns"], inputs, columns=columns, **more)

    def _recomputed(self) -> Call | None:
        """Return the finished call whose backward pass this thread is computing; None if it computes none."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number = node._sequence_nr()
        with self._lock:
            found = [call for call in self._finished if call.last is not None and call.first <= number < call.last]
        if len(found) > 1:  # node numbers are counted in each thread
            found = [call for call in found if call.thread is threading.current_thread()]
            if len(found) != 1:
                raise GateError(
                    "several threads called the gated model, and it is not certain whose layer is recomputed; run forward and "
                    "backward pass of a call in one thread, or train without activation checkpointing"
                )
        return found[0] if found else None


def is_backward() -> bool:
    """Return whether this thread is computing a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_autograd_node() is not None


def _still_running(stack: Sequence[tuple[Part, Call]], called: Part) -> list[tuple[Part, Call]]:
    """Return the entries of a stack whose modules are running, by the frames of this thread, while another one is called.

    An interrupt runs no hook that would say that a module has ended.
    """
    running: list[nn.Module] = []
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            running.append(frame.f_locals["self"])
        frame = frame.f_back  # type: ignore[assignment]
    if called.module in running:  # its own new call is one of the frames
        running.remove(called.module)
    return [entry for entry in stack if any(module is entry[0].module for module in running)]


def _keep(call: Call, gradient: Tensor) -> None:
    """Do nothing: the hook owns the call."""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, Mapping):
        yield from _tensors(list(output.values()))
    elif is_dataclass(output):
        yield from _tensors(list(vars(output).values()))
