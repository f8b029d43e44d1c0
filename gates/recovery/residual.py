"""Watch a running model add to its residual stream: which projections write to it, and what their output is added to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gates.sites import Projection

ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass(frozen=True)
class Written:
    """One call of a projection.

    Args:
        name: of the projection.
        inputs: of the projection, ``[..., in]``.
        output: of the projection, ``[..., out]``.
        stream: what the output is added to, ``[..., out]``; None where it is not added to anything as it is (a norm or a
            factor comes between).
    """

    name: str
    inputs: Tensor
    output: Tensor
    stream: Tensor | None


@contextmanager
def watch_writers(
    projections: Mapping[str, Projection], *, enough: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[list[Written]]:
    """Record every call of some projections, with what its output is added to.

    Args:
        projections: by name. Outputs that are added to each other first (see below) have to be watched together.
        enough: end the block once these are recorded: by name, how many calls, and of how many of them the output has been
            added to something; None to go on.

    Yields:
        A list that is complete once the block has ended: every call, in the order of the model.
    """
    written: list[Written] = []

    def seen_enough(streams: Collection[int]) -> bool:  # not by its name, since a circle would keep all that was recorded
        if enough is None:
            return False
        called = Counter(call.name for call in written)
        added = Counter(written[call].name for call in streams)
        return all(called[name] >= calls and added[name] >= streams for name, (calls, streams) in enough.items())

    additions = _Additions(seen_enough)

    def called(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        copied = output.clone()  # the model may go on with it in place
        written.append(Written(name, args[0], copied, None))
        additions.follow(len(written) - 1, output)

    with ExitStack() as stack:
        for name, module in projections.items():
            stack.callback(module.register_forward_hook(partial(called, name)).remove)
        stack.enter_context(additions)
        stack.enter_context(suppress(_SeenEnoughError))
        yield written
    for call, stream in additions.streams.items():
        written[call] = Written(written[call].name, written[call].inputs, written[call].output, stream)


class _SeenEnoughError(Exception):
    """What ends a forward pass that nothing more is wanted of."""


@dataclass
class _Sum:
    """A tensor that outputs of projections have been added up to, and of each of them the rest of the sum."""

    tensor: Tensor
    rests: Mapping[int, Tensor | None] = field(default_factory=dict)


class _Additions(TorchDispatchMode):
    """Follows outputs of projections to the first sum with something else.

    A layer with attention and feed-forward side by side (GPT-J, Falcon) adds their outputs to each other first: then that sum
    is followed, and the stream of either is the other output and what the sum is added to. Something made after an output is
    no stream: activation functions add such terms.

    Args:
        seen_enough: from the calls whose outputs were added to something to whether to raise :class:`_SeenEnoughError`; asked
            after every call and every stream.

    Attributes:
        streams: by the number of a call, what its output was added to.
    """

    def __init__(self, seen_enough: Callable[[Collection[int]], bool]) -> None:
        super().__init__()
        self.seen_enough = seen_enough
        self.streams: dict[int, Tensor] = {}
        self._sums: list[_Sum] = []
        self._time = 0
        self._made: dict[int, int] = {}  # when the tensor of an id was made; ids are used again, so the last time counts
        self._called: dict[int, int] = {}

    def follow(self, call: int, output: Tensor) -> None:
        self._called[call] = self._time
        self._sums.append(_Sum(output, {call: None}))
        self._end_if_enough()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        adds = func in ADDITIONS and isinstance(args[1], Tensor) and args[0].shape == args[1].shape
        before = args[0].clone() if adds and func is torch.ops.aten.add_.Tensor else args[0] if adds else None
        result = func(*args, **(kwargs or {}))
        self._time += 1
        if before is not None and self._added(args[0], args[1], before, result):
            self._made[id(result)] = 0  # the stream itself, whatever was called meanwhile
        elif isinstance(result, Tensor) and all(result is not one for one in args):
            self._made[id(result)] = self._time
        return result

    def _added(self, one: Tensor, other: Tensor, before: Tensor, result: Tensor) -> bool:
        """A sum of two; whether it is a stream that something followed was added to.

        Args:
            one, other: summands.
            before: content of the first, which may hold the sum now.
            result: the sum.
        """
        first, second = self._take(one), self._take(other)
        if first is not None and second is not None:
            rests: dict[int, Tensor | None] = {call: _plus(rest, other) for call, rest in first.rests.items()}
            rests |= {call: _plus(rest, before) for call, rest in second.rests.items()}
            self._sums.append(_Sum(result, rests))
            return False
        known = len(self.streams)
        for found, beside, content in ((first, other, other), (second, one, before)):
            for call, rest in found.rests.items() if found is not None else ():
                if self._made.get(id(beside), 0) <= self._called[call]:
                    self.streams[call] = _plus(rest, content)
        self._end_if_enough()
        return len(self.streams) > known

    def _end_if_enough(self) -> None:
        if self.seen_enough(self.streams):
            raise _SeenEnoughError

    def _take(self, tensor: Tensor) -> _Sum | None:
        found = next((position for position, sum_ in enumerate(self._sums) if sum_.tensor is tensor), None)
        return None if found is None else self._sums.pop(found)


def _plus(rest: Tensor | None, more: Tensor) -> Tensor:
    return more.clone() if rest is None else rest + more
