"""Tell which call of a model an attention module runs for, so that a draw of the gates belongs to one call.

Under activation checkpointing a layer runs a second time during the backward pass, when the model may have been called again.
PyTorch numbers the nodes of the autograd graph in the order in which they are made. So the number of the node whose gradient
is being computed lies between the first and the last number of the call that it belongs to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import _get_sequence_nr

from gates.errors import GateError

Values = Sequence[Tensor] | None
"""The gate values of every site, each ``[gates]`` or ``[examples, gates]``; None if all are one."""


@dataclass(eq=False)
class Call:
    """One call of a model, or of a part of it that is called alone.

    Args:
        values: The gate values of the call.
        inputs: The module and the arguments of the call while it runs; None afterwards.
        name: The path of the called module.
        thread: The thread of the call.
        first, last: The numbers of its autograd nodes, ``first <= number < last``; ``last`` is None while it runs.
        without_graph: The sites that ran under ``torch.no_grad``.
    """

    values: Values
    inputs: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
    name: str = ""
    thread: int = 0
    first: int = 0
    last: int | None = None
    without_graph: set[int] = field(default_factory=set)

    def at(self, site: int) -> Tensor | None:
        """Return the gate values of a site, or None if they are one.

        Raises:
            GateError: if the site is recomputed under reentrant checkpointing. That differentiates each layer on its own, and
                the graph of a draw that all layers share is gone after the first.
        """
        if self.values is None:
            return None
        if not torch.compiler.is_compiling() and self.values[site].requires_grad:
            if not torch.is_grad_enabled():
                self.without_graph.add(site)
            elif self.last is not None and site in self.without_graph:
                raise GateError(
                    "gates cannot be trained under reentrant activation checkpointing; give it use_reentrant=False, as in "
                    "model.gradient_checkpointing_enable({'use_reentrant': False})"
                )
        return self.values[site]

    def drew(self) -> bool:
        """Return whether the values were computed in the call, with a graph; others are given or fixed."""
        made_by = None if self.values is None else self.values[0].grad_fn
        return made_by is not None and made_by._sequence_nr() >= self.first


class Calls:
    """The running call of each thread, and the finished calls that can still be differentiated.

    Compiled code has one running call for all threads, since the compiler cannot trace which thread it is in.
    """

    def __init__(self) -> None:
        self._compiled: tuple[str, Call] | None = None
        self._running: dict[int, tuple[str, Call]] = {}
        self._finished: WeakSet[Call] = WeakSet()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()  # a copy of the gates has had no calls

    def running(self) -> Call | None:
        """Return the running call of this thread; None outside of calls."""
        current = self._current()
        return None if current is None else current[1]

    def _current(self) -> tuple[str, Call] | None:
        return self._compiled if torch.compiler.is_compiling() else self._running.get(threading.get_ident())

    def begin(self, name: str, values: Callable[[], Values], inputs: tuple[nn.Module, tuple[Any, ...], dict[str, Any]]) -> None:
        """Begin a call, unless a call runs around it already. A part that is recomputed continues its own call.

        Args:
            name: The path of the called module in the model; empty for the whole model.
            values: A function that returns the gate values of a new call.
            inputs: The called module with its positional and keyword arguments.
        """
        current = self._current()
        if current is not None and name != current[0] and name.startswith(f"{current[0]}." if current[0] else ""):
            return
        if torch.compiler.is_compiling():
            self._compiled = (name, Call(values(), inputs, name))
            return
        thread = threading.get_ident()
        first, call = _get_sequence_nr(), self._recomputed(thread)
        if call is None or (call.name == name and call.drew()):  # a draw that is recomputed has to be made again
            call = Call(values(), inputs, name, thread, first)
        self._running[thread] = self._compiled = (name, call)

    def end(self, name: str, output: Any) -> None:
        """End the call that began with ``name``; its values stay for as long as its output can be differentiated."""
        current = self._current()
        if current is None or current[0] != name:
            return
        self._compiled = None
        if torch.compiler.is_compiling():
            return
        del self._running[threading.get_ident()]
        call = current[1]
        call.inputs = None
        if call.last is None:
            call.last = _get_sequence_nr()
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(_keep, call))  # the graph of the output owns the call
                    with self._lock:
                        self._finished.add(call)

    def _recomputed(self, thread: int) -> Call | None:
        """Return the finished call whose backward pass this thread is computing; None if it computes none."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number = node._sequence_nr()
        with self._lock:
            found = [call for call in self._finished if call.last is not None and call.first <= number < call.last]
        if len(found) > 1:  # node numbers are counted in each thread
            found = [call for call in found if call.thread == thread]
        if len(found) > 1:
            raise GateError(
                "several threads called the gated model, and it is not certain whose layer is recomputed; run forward and "
                "backward pass of a call in one thread, or train without activation checkpointing"
            )
        return found[0] if found else None


def is_backward() -> bool:
    """Return whether this thread is computing a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_autograd_node() is not None


def _keep(call: Call, gradient: Tensor) -> None:
    """Do nothing: the hook owns the call."""


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list, Mapping)):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(part)
