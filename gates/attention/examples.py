"""Which example of a batch the rows of an attention module belong to.

Most models keep examples on the first axis. Some put time first (FSMT), some fold more into the first axis: the choices of
a question (BertForMultipleChoice), the windows of an image (Swin), the frames of a video. Shapes alone do not tell them
apart: a square batch of four texts of four tokens has either axis. So it is found out by touching examples one group
at a time and looking at which rows feel it: in :func:`locate`, either by the gradients of some examples' losses or by
other inputs in the place of some examples.
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
"""In the place of an example's number: rows that no example touches, and rows that several do."""

COUNTED = (
    "input_ids", "inputs_embeds", "pixel_values", "pixel_values_videos", "input_features", "input_values",
    "decoder_input_ids", "decoder_inputs_embeds", "attention_mask",
)  # fmt: skip
"""Inputs of Transformers models that have an example per row, in the order in which they are asked for the number."""


@dataclass(frozen=True)
class ExampleAxis:
    """Where the examples are in a tensor ``[..., features]`` of a site.

    Args:
        axis: the axis they lie on.
        fold: rows of this axis that each example has, such as its choices or windows.
        interleaved: whether the rows of an example are not next to each other but as far apart as there are examples.

    >>> ExampleAxis(axis=0, fold=2, interleaved=False).numbers(examples=3).tolist()
    [0, 0, 1, 1, 2, 2]
    """

    axis: int
    fold: int
    interleaved: bool

    def numbers(self, examples: int) -> Tensor:
        """The example of each row of the axis, ``[examples * fold]``."""
        numbers = torch.arange(examples)
        return numbers.repeat(self.fold) if self.interleaved else numbers.repeat_interleave(self.fold)

    def fits(self, shape: Sequence[int], examples: int) -> bool:
        """Whether ``shape``, ``[..., features]``, has such an axis."""
        return self.axis < len(shape) - 1 and shape[self.axis] == examples * self.fold

    def spread(self, values: Tensor, dimensions: int) -> Tensor:
        """Return values per example ``[examples, gates]`` as values of the rows, ``[..., gates]``, of size 1 on all axes but
        this one."""
        folded = values
        if self.fold > 1:
            folded = values.repeat(self.fold, 1) if self.interleaved else values.repeat_interleave(self.fold, dim=0)
        return folded.view(*(len(folded) if axis == self.axis else 1 for axis in range(dimensions - 1)), -1)

    def collect(self, rows: Tensor, examples: int) -> Tensor:
        """The sum ``[examples, gates]`` over all rows ``[..., gates]`` of each example."""
        along = rows.movedim(self.axis, 0).flatten(1, -2) if rows.dim() > 2 else rows.unsqueeze(1)
        sizes = (self.fold, examples) if self.interleaved else (examples, self.fold)
        return along.sum(1).unflatten(0, sizes).sum(0 if self.interleaved else 1)


def collect(rows: Tensor, numbers: Tensor, examples: int) -> Tensor:
    """The sum of each example's rows, wherever they are.

    Args:
        rows: ``[..., gates]``.
        numbers: example of each row, ``[...]``; rows without one do not count.

    Returns:
        ``[examples, gates]``.
    """
    known = numbers >= 0
    return rows.new_zeros(examples, rows.shape[-1]).index_add(0, numbers[known], rows[known])


def locate(touched: Callable[[Tensor], Sequence[Tensor]], examples: int) -> list[Tensor]:
    """The example that each row belongs to, exactly and whatever their order, from ``2 log2(examples)`` questions.

    Two examples differ in some digit of their binary numbers. So for each digit, those that have it set are touched, and
    those that have not.

    Args:
        touched: function from a group of examples, bool ``[examples]``, to the rows that they touch, bool ``[...]`` for each
            of several tensors.
        examples: number of examples.

    Returns:
        For each tensor the number of the example, ``[...]``; :data:`UNKNOWN` for rows that some digit does not touch and
        :data:`MIXED` for those that examples with and without a digit touch.
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
    """Return all axes that agree with the examples of the rows ``[...]`` from :func:`locate`, which are negative where not
    known."""
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
    """The first axis of ``[..., features]``, if it alone can have the examples by its size; None otherwise: another axis of
    this size may be that of positions."""
    several = [axis for axis, size in enumerate(shape[:-1]) if size % examples == 0]
    return ExampleAxis(0, fold=1, interleaved=False) if several == [0] and shape[0] == examples else None


def count_examples(inputs: Mapping[str, Any]) -> int:
    """The number of examples among a model's named inputs."""
    lengths = {name: len(value) for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    known = next((lengths[name] for name in COUNTED if name in lengths), None)
    if known is not None:
        return known
    if len(set(lengths.values())) != 1:
        raise GateError(
            f"gates are drawn per example, and the inputs do not say how many examples there are (rows: {lengths or 'none'}); "
            "call the model with input_ids or another input of Transformers, or draw per batch"
        )
    return next(iter(lengths.values()))


def replaced(inputs: Any, group: Tensor) -> Any:
    """A model's inputs with the first example outside a group in the place of all those in it.

    Args:
        inputs: tensors, and lists, tuples and dictionaries of them; those with a first dimension other than that of the
            group stay as they are.
        group: bool ``[examples]``, neither all nor none.
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


# Where the examples are in the heads of each site of a model, found out once by running it with other inputs.

Reached = dict[tuple[int, torch.Size], Tensor]
"""Tensors by the site that they belong to and the shape of its heads, ``[..., heads * head_dim]``."""


class ExampleAxes:
    """What is known of the examples' place in each site's heads."""

    def __init__(self, model: nn.Module, sites: Sequence[AttentionSite]) -> None:
        self._model = model
        self._sites = sites
        self._axes: list[list[ExampleAxis]] = [[] for _ in sites]
        self._of_losses: dict[Hashable, ExampleAxes] = {}

    def of_losses(self, code: Hashable) -> ExampleAxes:
        """What is known of the rows that the losses of some code depend on, see :mod:`gates.scores.importance`."""
        return self._of_losses.setdefault(code, ExampleAxes(self._model, self._sites))

    def known(self, site: int, shape: Sequence[int], examples: int) -> ExampleAxis | None:
        """The axis in heads of this shape ``[..., heads * head_dim]``; None if it has not been found out."""
        if examples == 1:
            return ExampleAxis(axis=0, fold=shape[0], interleaved=False)
        for axis in self._axes[site]:
            if axis.fits(shape, examples):
                return axis
        return None

    def learn(self, site: int, numbers: Tensor, examples: int) -> None:
        """Keep where the examples are, if the numbers of the rows ``[...]``, from :func:`locate`, leave no choice."""
        if not bool((numbers >= 0).any()):
            return  # nothing was touched, so nothing is known
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
        """Return the axis in heads of this shape ``[..., heads * head_dim]``, found out if nothing else tells.

        Args:
            inputs: The running module with the arguments of its call; None if it may not run again.
        """
        axis = self.known(site, shape, examples) or only_axis(shape, examples)
        if axis is None and inputs is not None:
            self._ask(*inputs, examples)
            axis = self.known(site, shape, examples)
        if axis is None:
            raise GateError(
                f"the heads at {self._sites[site].name!r} have shape {list(shape)}, and it is not certain which rows belong to "
                f"which of {examples} examples; call the whole model, without a cache and not sharded, on examples that "
                "differ, or use gates that are the same for the batch (draw_per='batch')"
            )
        return axis

    @torch.compiler.disable  # without a reason, which PyTorch 2.7 does not take
    @torch.no_grad()
    def _ask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], examples: int) -> None:
        """Put some examples into the place of others in a copy of a module without gates, and see which rows change."""
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            return  # the model fills it, and has begun to
        if is_sharded(self._model):
            return  # a sharded layer that has run lets go of its weights, and this one has not run yet
        alone, inside = evaluation_copy(module)
        seen: Reached = {}

        def see(site: int, _: nn.Module, given: tuple[Any, ...]) -> None:
            seen.setdefault((site, given[0].shape), given[0])

        def heads_with(group: Tensor | None) -> Reached:
            own, named = (args, kwargs) if group is None else replaced((args, kwargs), group)
            seen.clear()
            alone.forward(*own, **named)
            return dict(seen)

        with running_copy(), calling_outputs(alone), kept_generators(self._model):
            for index, site in enumerate(self._sites):
                if site.output in inside:
                    inside[site.output].register_forward_pre_hook(partial(see, index))
            try:
                before = heads_with(None)

                def touched(group: Tensor) -> list[Tensor]:
                    after = heads_with(group)
                    return [(after[place] != heads).any(-1) for place, heads in before.items()]

                found = locate(touched, examples)
            except Exception:  # models refuse inputs in many ways, such as texts whose pictures are those of others
                return
            for (site_index, _), numbers in zip(before, found, strict=True):
                self.learn(site_index, numbers, examples)
