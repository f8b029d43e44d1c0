"""Find which example of a batch each row of an attention module belongs to.

Most models keep examples on the first axis. Some put time first (FSMT). Others fold more into the first axis: the choices of
a question (BertForMultipleChoice), the windows of an image (Swin), the frames of a video. Shapes are ambiguous: a batch of four
texts of four tokens has two equal axes. So :func:`locate` changes groups of examples and observes which rows react, either by
the gradients of some examples' losses or by replaced inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from gates.attention.modes import evaluation_copy, is_sharded, kept_generators, running_copy
from gates.attention.own_method import calling_outputs
from gates.attention.sites import AttentionSite
from gates.errors import GateError

UNKNOWN, MIXED = -1, -2
"""Replace the number of an example for rows that no example changes, and for rows that several change."""

COUNTED = (
    "input_ids", "inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "input_values",
    "decoder_input_ids", "decoder_inputs_embeds", "attention_mask",
)  # fmt: skip
"""The inputs of Transformers models with one example per row, in the order in which they are used to count examples."""


@dataclass(frozen=True)
class ExampleAxis:
    """Describe where the examples are in a tensor ``[..., features]`` of a site.

    Args:
        axis: The axis of the examples.
        fold: The number of rows per example on this axis, such as its choices or windows.
        interleaved: Whether the rows of an example are not adjacent, but separated by the number of examples.

    >>> ExampleAxis(axis=0, fold=2, interleaved=False).numbers(examples=3).tolist()
    [0, 0, 1, 1, 2, 2]
    """

    axis: int
    fold: int
    interleaved: bool

    def numbers(self, examples: int) -> Tensor:
        """Return the example of each row of the axis, ``[examples * fold]``."""
        numbers = torch.arange(examples)
        return numbers.repeat(self.fold) if self.interleaved else numbers.repeat_interleave(self.fold)

    def fits(self, shape: Sequence[int], examples: int) -> bool:
        """Return whether ``shape``, ``[..., features]``, has such an axis."""
        return self.axis < len(shape) - 1 and shape[self.axis] == examples * self.fold

    def folded(self, values: Tensor) -> Tensor:
        """Repeat values ``[examples, gates]`` for the rows of each example, ``[examples * fold, gates]``."""
        if self.fold == 1:
            return values
        return values.repeat(self.fold, 1) if self.interleaved else values.repeat_interleave(self.fold, dim=0)

    def sizes(self, rows: int, dimensions: int) -> list[int]:
        """Return the sizes of all axes but the last of a tensor with this number of rows, and size 1 on all other axes."""
        return [rows if axis == self.axis else 1 for axis in range(dimensions - 1)]

    def collect(self, rows: Tensor, examples: int) -> Tensor:
        """Sum the rows ``[..., gates]`` of each example to ``[examples, gates]``."""
        along = rows.movedim(self.axis, 0).flatten(1, -2) if rows.dim() > 2 else rows.unsqueeze(1)
        sizes = (self.fold, examples) if self.interleaved else (examples, self.fold)
        return along.sum(1).unflatten(0, sizes).sum(0 if self.interleaved else 1)


def collect(rows: Tensor, numbers: Tensor, examples: int) -> Tensor:
    """Sum the rows ``[..., gates]`` of each example, in any order, to ``[examples, gates]``.

    ``numbers`` are the examples of the rows, ``[...]``. Rows with a negative number do not count.
    """
    known = numbers >= 0
    return rows.new_zeros(examples, rows.shape[-1]).index_add(0, numbers[known], rows[known])


def locate(touched: Callable[[Tensor], Sequence[Tensor]], examples: int) -> list[Tensor]:
    """Find the example that each row belongs to, in any order, by ``2 log2(examples)`` calls.

    Two examples differ in some digit of their binary numbers. So for each digit, the examples with the digit set are touched,
    and then the others.

    Args:
        touched: A function from a group of examples, bool ``[examples]``, to the rows that change with them, bool ``[...]``
            for each of several tensors.

    Returns:
        For each tensor the numbers of the examples, ``[...]``. A row has :data:`UNKNOWN` if neither group of some digit
        touches it, and :data:`MIXED` if both groups do.
    """
    all_numbers = torch.arange(examples)
    located: list[Tensor] = []
    for digit in range(max(1, (examples - 1).bit_length())):
        is_set = (all_numbers >> digit) % 2 == 1
        for place, (with_digit, without) in enumerate(zip(touched(is_set), touched(~is_set), strict=True)):
            if digit == 0:
                located.append(torch.zeros_like(with_digit, dtype=torch.long))
            number = located[place] + (with_digit.long() << digit)
            number = torch.where(with_digit | without, number, UNKNOWN)
            number = torch.where(with_digit & without, MIXED, number)
            located[place] = torch.where(located[place] < 0, located[place], number)
    return located


def axes_of(numbers: Tensor, examples: int) -> list[ExampleAxis]:
    """Return all axes that agree with the numbers of the rows ``[...]`` from :func:`locate`, ignoring negatives."""
    found = []
    for axis, size in enumerate(numbers.shape):
        for interleaved in (False, True)[: 2 if size > examples else 1]:
            candidate = ExampleAxis(axis, size // examples, interleaved)
            if not candidate.fits((*numbers.shape, 1), examples):
                continue
            expected = candidate.numbers(examples).to(numbers.device)
            expected = expected.view(*(-1 if own == axis else 1 for own in range(numbers.dim())))
            if bool(((numbers == expected) | (numbers < 0)).all()):
                found.append(candidate)
    return found


def only_axis(shape: Sequence[int], examples: int) -> ExampleAxis | None:
    """Return the first axis of ``[..., features]`` if no other axis has a size that fits the examples; else None."""
    several = [axis for axis, size in enumerate(shape[:-1]) if size % examples == 0]
    return ExampleAxis(0, fold=1, interleaved=False) if several == [0] and shape[0] == examples else None


def count_examples(inputs: Mapping[str, Any]) -> int:
    """Return the number of examples in a model's named inputs."""
    lengths = {name: len(value) for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    known = next((lengths[name] for name in COUNTED if name in lengths), None)
    if known is not None:
        return known
    if len(set(lengths.values())) != 1:
        raise GateError(
            f"gates are drawn per example, but the inputs have no common number of rows ({lengths or 'none'}); call the model "
            "with input_ids, or use draw_per='batch'"
        )
    return next(iter(lengths.values()))


def replaced(inputs: Any, group: Tensor) -> Any:
    """Replace all examples of a group by the first example outside it.

    Args:
        inputs: Tensors, and lists, tuples and dictionaries of them. Tensors without one row per example are not changed.
        group: The group, bool ``[examples]``, neither all nor none.
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() == 0 or len(inputs) != len(group):
            return inputs
        source = torch.where(group, (~group).nonzero()[0], torch.arange(len(group)))
        return inputs[source.to(inputs.device)]
    if isinstance(inputs, dict):
        return type(inputs)(**{name: replaced(value, group) for name, value in inputs.items()})
    if type(inputs) in (list, tuple):
        return type(inputs)(replaced(value, group) for value in inputs)
    return inputs


HeadsBySite = dict[tuple[int, torch.Size], Tensor]
"""The heads ``[..., heads * head_dim]`` by the index of their site and their shape."""


class ExampleAxes:
    """Find the axis of examples in the heads of each site, once for each shape."""

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._model = model
        self._sites = sites
        self._axes: list[list[ExampleAxis]] = [[] for _ in sites]
        self._of_losses: dict[Hashable, ExampleAxes] = {}

    def of_losses(self, code: Hashable) -> ExampleAxes:
        """Return the axes found by the losses of some code; see :mod:`gates.scores.importance`."""
        return self._of_losses.setdefault(code, ExampleAxes(self._model, self._sites))

    def known(self, site: int, shape: Sequence[int], examples: int) -> ExampleAxis | None:
        """Return the axis in heads of this shape ``[..., heads * head_dim]``; None if it has not been found yet."""
        if examples == 1:
            return ExampleAxis(axis=0, fold=shape[0], interleaved=False)
        for axis in self._axes[site]:
            if axis.fits(shape, examples):
                return axis
        return None

    def learn(self, site: int, numbers: Tensor, examples: int) -> None:
        """Keep the axis if exactly one agrees with the numbers of the rows ``[...]`` from :func:`locate`."""
        if not bool((numbers >= 0).any()):
            return
        candidates = axes_of(numbers, examples)
        if len(candidates) == 1 and candidates[0] not in self._axes[site]:
            self._axes[site].append(candidates[0])

    def of(
        self,
        site: int,
        shape: Sequence[int],
        examples: int,
        inputs: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None,
    ) -> ExampleAxis:
        """Return the axis in heads of this shape ``[..., heads * head_dim]``, by further runs of the model if necessary.

        Args:
            inputs: The running module with the arguments of its call; None if it may not run again.
        """
        axis = self.known(site, shape, examples) or only_axis(shape, examples)
        if axis is None and inputs is not None:
            self._probe(*inputs, examples)
            axis = self.known(site, shape, examples)
        if axis is None:
            raise GateError(
                f"heads of shape {list(shape)} at {self._sites[site].name!r} are ambiguous for {examples} examples; run the "
                "whole, unsharded model without a cache on distinct examples, or use draw_per='batch'"
            )
        return axis

    @torch.compiler.disable  # without a reason, which PyTorch 2.7 does not take
    @torch.no_grad()
    def _probe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], examples: int) -> None:
        """Replace some examples by others in a copy of the module without gates, and find which rows change."""
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return  # further runs would fill the cache again
        if is_sharded(self._model):
            return  # a sharded layer frees its weights after it runs, and this one has not run yet
        copied, copies = evaluation_copy(module)
        found_heads: HeadsBySite = {}

        def keep_heads(site: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
            found_heads.setdefault((site, inputs[0].shape), inputs[0])

        def heads_with(group: Tensor | None) -> HeadsBySite:
            positional, named = (args, kwargs) if group is None else replaced((args, kwargs), group)
            found_heads.clear()
            copied.forward(*positional, **named)
            return dict(found_heads)

        with running_copy(), calling_outputs(copied), kept_generators(self._model):
            for index, site in enumerate(self._sites):
                if site.output in copies:
                    copies[site.output].register_forward_pre_hook(partial(keep_heads, index))
            try:
                before = heads_with(None)

                def touched(group: Tensor) -> list[Tensor]:
                    after = heads_with(group)
                    return [(after[place] != heads).any(-1) for place, heads in before.items()]

                found = locate(touched, examples)
            except Exception:  # models refuse inputs in many ways, such as texts with the pictures of other examples
                return
            for (site_index, _), numbers in zip(before, found, strict=True):
                self.learn(site_index, numbers, examples)
