"""Run a model again from where its finished blocks end, so that what is known of a batch is not computed twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Block:
    """A layer of a model: a member of a list of modules.

    Args:
        name: in the model.
        module: the layer.
    """

    name: str
    module: nn.Module

    @property
    def stack(self) -> str:
        """Name of the list that it is in."""
        return self.name.rpartition(".")[0]


def block_of(model: nn.Module, name: str) -> Block | None:
    """The outermost block that a module lies in; None if it is in none.

    Args:
        model: with the module.
        name: of the module.

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
            batch: number of the batch that the model runs on.
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
