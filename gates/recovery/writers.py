"""The projections that write to the residual stream, and passes of a model as far as some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.recovery.reentry import Block, FinishedStates, block_of
from gates.recovery.residual import Written, watch_writers
from gates.sites import Projection


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
        gates: attached.
        values: of the gates, ``[gates]``.
        weights: in force in place of the model's own, by name; they may be added to.
        forward: function that runs the model on a batch.
        writers: all, in the order of the model.
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
