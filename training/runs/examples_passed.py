"""How many examples pass through a model, whoever runs it: training, scores, searches, refits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gates.head_gates import HeadGates


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
