"""Observe which projections of a running model write to its residual stream, and the tensors that they are added to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gates.attention.sites import Projection
from gates.errors import GateError
from gates.gating.head_gates import HeadGates

ADDITIONS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass(frozen=True)
class Written:
    """Hold one call of a projection: its name, inputs ``[..., in]``, output ``[..., out]``, and the stream ``[..., out]`` that
    the output is added to. The stream is None where a norm or a factor comes between."""

    name: str
    inputs: Tensor
    output: Tensor
    stream: Tensor | None


@contextmanager
def watch_writers(
    projections: Mapping[str, Projection], *, enough: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[list[Written]]:
    """Record every call of some projections with its stream, in a list that is complete after the block.

    Args:
        projections: The projections by name. Outputs that are added to each other first have to be observed together.
        enough: By name, the numbers of calls and of streams after which the forward pass ends. None for a full pass.
    """
    written: list[Written] = []

    def seen_enough(streams: Collection[int]) -> bool:  # gets the streams, because a reference cycle would keep all records
        if enough is None:
            return False
        called = Counter(call.name for call in written)
        added = Counter(written[call].name for call in streams)
        return all(called[name] >= calls and added[name] >= streams for name, (calls, streams) in enough.items())

    additions = _Additions(seen_enough)

    def called(name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        copied = output.clone()  # the model may change it in place
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
    """End a forward pass after everything is recorded."""


@dataclass
class _Sum:
    """Hold a sum of projection outputs, and for each call the rest of the sum."""

    tensor: Tensor
    remainders: Mapping[int, Tensor | None] = field(default_factory=dict)


class _Additions(TorchDispatchMode):
    """Follow outputs of projections to the first sum with another tensor.

    A layer with parallel attention and feed-forward (GPT-J, Falcon) adds their outputs to each other first. Then the sum is
    followed, and the stream of either output is the other output plus the tensor that the sum is added to. A tensor made after
    an output is not a stream, because activation functions add such terms.

    Args:
        seen_enough: A function from the calls with streams to whether to end the pass, called after every call and stream.

    Attributes:
        streams: The stream of each call, by its number.
    """

    def __init__(self, seen_enough: Callable[[Collection[int]], bool]) -> None:
        super().__init__()
        self.seen_enough = seen_enough
        self.streams: dict[int, Tensor] = {}
        self._sums: list[_Sum] = []
        self._time = 0
        self._made: dict[int, int] = {}  # the time when the tensor of an id was made; ids are reused, so the last time counts
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
        """Follow a sum of two tensors, and return whether it contains a new stream. ``before`` is the first tensor before the
        addition, which may be in place."""
        first, second = self._take(one), self._take(other)
        if first is not None and second is not None:
            remainders: dict[int, Tensor | None] = {
                call: _plus(remainder, other) for call, remainder in first.remainders.items()
            }
            remainders |= {call: _plus(remainder, before) for call, remainder in second.remainders.items()}
            self._sums.append(_Sum(result, remainders))
            return False
        known = len(self.streams)
        for found, added, content in ((first, other, other), (second, one, before)):
            for call, remainder in found.remainders.items() if found is not None else ():
                if self._made.get(id(added), 0) <= self._called[call]:
                    self.streams[call] = _plus(remainder, content)
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


@dataclass(frozen=True)
class Block:
    """Name a layer of a model, which is a member of a list of modules."""

    name: str
    module: nn.Module

    @property
    def stack(self) -> str:
        """Return the name of its list."""
        return self.name.rpartition(".")[0]


def block_of(model: nn.Module, name: str) -> Block | None:
    """Return the outermost block that contains a module; None if there is none.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]), "head": nn.Linear(2, 2)})
    >>> block_of(model, "layers.0.0").name, block_of(model, "head")
    ('layers.0', None)
    """
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            block = ".".join(parts[: depth + 1])
            return Block(block, model.get_submodule(block))
    return None


class FinishedStates:
    """Keep the output of the last finished block for each batch and stack, so that a pass can start there.

    A stack is a list of blocks that only use the output of the block before. Where a model uses outputs of earlier
    blocks too, results are wrong, so check this before.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], tuple[Block, Any]] = {}

    @contextmanager
    def entered(self, batch: int, finished: Sequence[Block], last: Block | None = None) -> Iterator[None]:
        """Make finished blocks return the kept output of the last of them instead of computing.

        Args:
            finished: The blocks that will not change, in the order of the model. Later calls may add blocks. The output of the
                last one of each stack is kept as soon as it has run.
            last: A block behind them that will not change either, after which the forward pass ends.
        """
        with ExitStack() as until_the_end:
            for stack, members in groupby(finished, key=lambda block: block.stack):
                blocks = list(members)
                kept, output = self._kept.get((batch, stack), (None, None))
                known = blocks.index(kept) + 1 if kept is not None else 0
                for block in blocks[:known]:
                    until_the_end.enter_context(_returning(block.module, output))
                if known < len(blocks):
                    until_the_end.callback(self._keep(batch, blocks[-1]))
            if last is not None:
                until_the_end.callback(self._keep(batch, last, ends=True))
            yield

    def _keep(self, batch: int, block: Block, *, ends: bool = False) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._kept[batch, block.stack] = block, _copy(output)  # the model may change it in place
            if ends:
                raise _SeenEnoughError

        return block.module.register_forward_hook(keep).remove


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Make a module return a copy of an output without computing it."""
    before = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: _copy(output)
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _copy(output: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, output)


@dataclass(frozen=True)
class Writer:
    """Describe a projection that writes to the residual stream."""

    name: str  # The name of the projection in the model
    module: Projection  # The projection
    attention: int  # The index of its attention site, or of the last one before it
    site: int | None  # The index of its attention site; None in a feed-forward layer
    block: Block | None  # The block that contains it; None if there is none
    calls: int  # The number of its calls in one pass
    added: int  # The number of calls whose output is added to the stream directly


class Passes:
    """Run the dense or the pruned model on batches, only as far as necessary.

    Args:
        values: The gate values, ``[gates]``.
        weights: The weights by name that replace the model's own. Entries may be added later.
        reenters: Whether a batch enters the model after finished blocks.
        fixed: Whether the weights stay as they are, so that a block is finished when its writers have run.
    """

    def __init__(
        self,
        gates: HeadGates,
        values: Tensor,
        weights: Mapping[str, Tensor],
        forward: Callable[[Any], object],
        writers: Sequence[Writer],
        *,
        reenters: bool,
        fixed: bool,
    ) -> None:
        self.gates, self.values, self.weights, self.forward = gates, values, weights, forward
        self.writers, self.reenters, self.fixed, self.states = writers, reenters, fixed, FinishedStates()

    def run(self, number: int, batch: Any, writers: Sequence[Writer]) -> list[Written]:
        """Return the calls of a single writer or of several writers in one block.

        Args:
            writers: The writers to record. All earlier writers already have their final weights.
        """
        block = writers[0].block
        before = self.writers[: self.writers.index(writers[0])]
        finished = dict.fromkeys(one.block for one in before if one.block is not None and one.block != block)
        observed = [one for one in self.writers if one in writers or (one.block is not None and one.block == block)]
        last = block if self.reenters and self.fixed else None
        enough = {one.name: (one.calls, one.added) for one in writers}
        with (
            self.gates.use(self.values),
            in_force(self.gates.model, self.weights),
            watch_writers({one.name: one.module for one in observed}, enough=enough if last is None else None) as calls,
            self.states.entered(number, list(finished) if self.reenters else [], last),
        ):
            self.forward(batch)
        return [call for call in calls if call.name in enough]


def find_writers(gates: HeadGates, batch: Any, forward: Callable[[Any], object]) -> tuple[list[Writer], bool]:
    """Return the projections that write to the residual stream, and whether a batch can enter after finished blocks.

    Writers are the output projections of all attention, and others whose output is added to the stream, in model order.
    """
    if batch is None:
        raise GateError("there are no batches to fit to; expected at least one")
    names = {id(module): name for name, module in gates.model.named_modules()}
    inside = {id(part) for site in gates.sites for part in site.module.modules()}
    sites = {names[id(site.output)]: index for index, site in enumerate(gates.sites)}
    projections = {name: gates.sites[index].output for name, index in sites.items()} | {
        name: module
        for name, module in gates.model.named_modules()
        if isinstance(module, Projection) and id(module) not in inside
    }
    with gates.use(torch.ones_like(gates.mask)), watch_writers(projections) as calls:
        forward(batch)
    writers: dict[str, Writer] = {}
    attention: int | None = None
    for call in calls:
        site = sites.get(call.name)
        if site is not None:
            attention = site
        elif attention is None or call.stream is None:
            continue
        module = projections[call.name]
        _check(call.name, module, gates.model)
        own = [other for other in calls if other.name == call.name]
        added = sum(other.stream is not None for other in own)
        block = block_of(gates.model, call.name)
        writers.setdefault(call.name, Writer(call.name, module, attention, site, block, len(own), added))
    return list(writers.values()), _reenters(gates, batch, forward, list(writers.values()), calls)


def _reenters(
    gates: HeadGates, batch: Any, forward: Callable[[Any], object], writers: Sequence[Writer], calls: Sequence[Written]
) -> bool:
    """Return whether all writers of a block run in one go, with equal bits after finished blocks and in a full pass.

    An attention that is itself a block, as in XLM, is excluded. A finished block does not call its projection, so its gates
    would report a bypass.
    """
    if any(_is_within_attention(one, gates) for one in writers):
        return False
    passes = Passes(gates, torch.ones_like(gates.mask), {}, forward, writers, reenters=True, fixed=True)
    blocks = [(block, list(members)) for block, members in groupby(writers, key=lambda writer: writer.block)]
    if len(dict.fromkeys(block for block, _ in blocks if block)) < sum(block is not None for block, _ in blocks):
        return False
    for _, members in blocks:
        names = {writer.name for writer in members}
        again, expected = passes.run(0, batch, members), [call for call in calls if call.name in names]
        if len(again) != len(expected) or not all(map(_same, again, expected)):
            return False
    return True


def _is_within_attention(writer: Writer, gates: HeadGates) -> bool:
    if writer.site is None or writer.block is None:
        return False
    return writer.block.module in gates.sites[writer.site].module.modules()


def _same(one: Written, other: Written) -> bool:
    pairs = ((one.inputs, other.inputs), (one.output, other.output), (one.stream, other.stream))
    return one.name == other.name and all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def _check(name: str, module: Projection, model: nn.Module) -> None:
    if not module.weight.is_floating_point() or module.weight.is_meta:
        raise GateError(
            f"the weights of {name!r} are {str(module.weight.dtype).removeprefix('torch.')} "
            f"{'on no device' if module.weight.is_meta else 'numbers'}; expected loaded floating-point weights"
        )
    owners = [other for other, part in model.named_modules() if getattr(part, "weight", None) is module.weight]
    if len(owners) > 1:
        raise GateError(f"{owners[0]!r} and {owners[1]!r} share one weight, so they cannot be refitted; untie them first")


@contextmanager
def in_force(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the values of some parameters temporarily, without copying them."""
    parameters = {name: model.get_parameter(name) for name in values}  # the slowest part, so it is done once
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, value in values.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value
