"""Which example of a batch the rows of an attention module belong to.

Most models keep examples on the first axis. Some put time first (FSMT), some fold more into the first axis: the choices of
a question (BertForMultipleChoice), the windows of an image (Swin), the frames of a video. Shapes alone do not tell them
apart: a square batch of four texts of four tokens has either axis. So it is found out by touching examples one group
at a time and looking at which rows feel it: in :func:`locate`, either by the gradients of some examples' losses or by
other inputs in the place of some examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        """Values per example as values of the rows.

        Args:
            values: ``[examples, gates]``.
            dimensions: number of dimensions that the result shall have.

        Returns:
            ``[..., gates]``, of size 1 on all axes but this one.
        """
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
        examples: number of examples.

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

    >>> rows = torch.tensor([2, 0, 1])
    >>> locate(lambda group: [group[rows]], examples=3)[0].tolist()
    [2, 0, 1]
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
    """All axes that agree with what is known of the rows.

    Args:
        numbers: example of each row ``[...]``, from :func:`locate`; negative where not known.
        examples: number of examples.
    """
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
    """The number of examples among a model's named inputs.

    Raises:
        GateError: where no known input is given and the others have first dimensions that differ.
    """
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
