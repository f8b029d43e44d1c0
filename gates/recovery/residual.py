"""Watch a running model add to its residual stream: which projections write to it, and what their output is added to."""

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
    """One call of a projection: its name, its inputs ``[..., in]``, its output ``[..., out]``, and what the output is added to,
    ``[..., out]``; None where it is not added to anything as it is (a norm or a factor comes between)."""

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
        """Follow a sum of two; whether it is a stream that something followed was added to. ``before`` is the content of the
        first, which may hold the sum now."""
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


# Run a model again from where its finished blocks end, so that what is known of a batch is not computed twice.


@dataclass(frozen=True)
class Block:
    """A layer of a model: a member of a list of modules, with its name in the model."""

    name: str
    module: nn.Module

    @property
    def stack(self) -> str:
        """Name of the list that it is in."""
        return self.name.rpartition(".")[0]


def block_of(model: nn.Module, name: str) -> Block | None:
    """The outermost block that a module lies in; None if it is in none.

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
    """What finished blocks put out, of each batch and stack that of the last one alone.

    A stack is a list of blocks each of which works on the output of the one before. Where a model uses the output of an
    earlier block too, what it computes with these states is something else; see that it does not before relying on them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str], tuple[Block, Any]] = {}

    @contextmanager
    def entered(self, batch: int, finished: Sequence[Block]) -> Iterator[None]:
        """Finished blocks do not compute again for the length of a ``with`` block, but give what the last of them gave.

        Args:
            finished: blocks that compute the same from now on, in the order of the model; more and more of them from call to
                call. The last one of each stack is kept as soon as it has run.
        """
        with ExitStack() as until_the_end:
            for stack, members in groupby(finished, key=lambda block: block.stack):
                blocks = list(members)
                last, output = self._kept.get((batch, stack), (None, None))
                known = blocks.index(last) + 1 if last is not None else 0
                for block in blocks[:known]:
                    until_the_end.enter_context(_giving(block.module, output))
                if known < len(blocks):
                    until_the_end.callback(self._keep(batch, blocks[-1]))
            yield

    def _keep(self, batch: int, block: Block) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._kept[batch, block.stack] = block, _copy(output)  # the model may go on with it in place

        return block.module.register_forward_hook(keep).remove


@contextmanager
def _giving(module: nn.Module, output: Any) -> Iterator[None]:
    """A module that gives a copy of an output without computing it."""
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


# The projections that write to the residual stream, and passes of a model as far as some of them.


@dataclass(frozen=True)
class Writer:
    """A projection that writes to the residual stream.

    Args:
        name: of the projection in the model.
        module: the projection.
        attention: index of the attention site that it belongs to, or that comes before it.
        site: index of its attention site; None for one of a feed-forward layer.
        block: that it lies in; None if in none.
        calls: how often it runs in one pass.
        added: how often its output is added to the stream as it is.
    """

    name: str
    module: Projection
    attention: int
    site: int | None
    block: Block | None
    calls: int
    added: int


class Passes:
    """Passes of one of the two models over the batches, each as far as it has to go.

    Args:
        values: of the gates, ``[gates]``.
        weights: in force in place of the model's own, by name; they may be added to.
        reenters: whether a batch enters the model again behind finished blocks.
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
    ) -> None:
        self.gates, self.values, self.weights, self.forward = gates, values, weights, forward
        self.writers, self.reenters, self.states = writers, reenters, FinishedStates()

    def run(self, number: int, batch: Any, wanted: Sequence[Writer]) -> list[Written]:
        """The calls of some writers, which lie in one block or are a single one.

        Args:
            number: of the batch.
            batch: to run on.
            wanted: the writers; the weights of all before them are what they stay.
        """
        before = self.writers[: self.writers.index(wanted[0])]
        finished = dict.fromkeys(one.block for one in before if one.block is not None and one.block != wanted[0].block)
        beside = [one for one in self.writers if one in wanted or (one.block is not None and one.block == wanted[0].block)]
        enough = {one.name: (one.calls, one.added) for one in wanted}
        with (
            self.gates.use(self.values),
            in_force(self.gates.model, self.weights),
            self.states.entered(number, list(finished) if self.reenters else []),
            watch_writers({one.name: one.module for one in beside}, enough=enough) as calls,
        ):
            self.forward(batch)
        return [call for call in calls if call.name in enough]


def find_writers(gates: HeadGates, batch: Any, forward: Callable[[Any], object]) -> tuple[list[Writer], bool]:
    """The projections that write to the residual stream, in the order of the model: those of all attention, and others whose
    output is as wide and is added to the stream; and whether a batch can enter the model again behind finished blocks."""
    if batch is None:
        raise GateError("there is nothing to fit to; expected at least one batch")
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
    """Whether all writers of a block are called in one go, and get and give the same, bit by bit, behind finished blocks as in
    a pass from the start. Not where an attention is itself a block, as in XLM: a finished block does not call its projection,
    which its gates take for a way round them."""
    if any(_is_within_attention(one, gates) for one in writers):
        return False
    passes = Passes(gates, torch.ones_like(gates.mask), {}, forward, writers, reenters=True)
    blocks = [(block, list(members)) for block, members in groupby(writers, key=lambda writer: writer.block)]
    if len(dict.fromkeys(block for block, _ in blocks if block)) < sum(block is not None for block, _ in blocks):
        return False
    for _, members in blocks[1:]:
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
            f"{'on no device' if module.weight.is_meta else 'numbers'}; expected floating-point weights that are loaded"
        )
    owners = [other for other, part in model.named_modules() if getattr(part, "weight", None) is module.weight]
    if len(owners) > 1:
        raise GateError(f"{owners[0]!r} and {owners[1]!r} share one weight, so neither can be refitted alone; untie them first")


@contextmanager
def in_force(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values of some parameters for the length of a ``with`` block, without copying them."""
    parameters = {name: model.get_parameter(name) for name in values}  # by far the dearest part, so it is done once
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, value in values.items():
            parameters[name].data = value
        yield
    finally:
        for name, value in before.items():
            parameters[name].data = value
