"""The language of the programs: what heads select and carry, and what feed-forward units compute, in the manner of RASP
(Weiss, Goldberg and Yahav 2021) and its compiler Tracr (Lindner et al. 2023).

The residual stream of a program holds *variables*: each a block of directions, one for every value that it can have, so that a
known value is a 1 in its place. ``letter`` and ``place`` are there from the embeddings; heads and units write the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LETTER, PLACE, ANSWER = "letter", "place", "answer"
FIRST = 0
"""The place of ``[CLS]``, to which heads attend that find nothing, and where the answer is read."""


@dataclass(frozen=True)
class Head:
    """A head that looks from each place for keys which match a query, and carries the mean of their values.

    Args:
        does: the function that it performs; heads of one name are interchangeable.
        query, key, value: variables that are read.
        to: the variable that is written.
        match: whether a value of the query selects a value of the key.
        carries: for a value of the variable that is read, the value that is written and how strongly; by default each value as
            it is.
    """

    does: str
    query: str
    key: str
    value: str
    to: str
    match: Callable[[int, int], bool]
    carries: Mapping[int, tuple[int, float]] | None = None


@dataclass(frozen=True)
class Unit:
    """One unit of a feed-forward layer: ``relu(weights . state + bias)``, added to the state with weights.

    Args:
        reads, writes: a weight for each (variable, value).
        bias: added before the ReLU.
    """

    reads: Mapping[tuple[str, int], float]
    writes: Mapping[tuple[str, int], float]
    bias: float = 0.0


@dataclass(frozen=True)
class Layer:
    """Heads side by side, then units side by side."""

    heads: tuple[Head, ...] = ()
    units: tuple[Unit, ...] = ()


@dataclass(frozen=True)
class Program:
    """A question about a string of letters, and how a Transformer answers it with yes or no.

    Args:
        name: of the program.
        question: in words.
        letters: that strings are made of, one character each.
        length: of every string.
        layers: of heads and units.
        needed: functions without which the question cannot be answered; other heads are of no use for it.
        draw: a string whose answer is yes or no, as asked for.
        answer: of a string.
        sizes: values of each variable that heads and units write, beside ``answer``.
        heads: in every layer; those that the program does not use are noise.
        cancelling: in every layer, pairs of loud heads that undo each other, in place of noise.
        hard: what makes it hard to tell which heads are needed, in words.
    """

    name: str
    question: str
    letters: str
    length: int
    layers: tuple[Layer, ...]
    needed: tuple[str, ...]
    draw: Callable[[random.Random, bool], str]
    answer: Callable[[str], bool]
    sizes: Mapping[str, int] = field(default_factory=dict)
    heads: int = 6
    cancelling: int = 0
    hard: str = "noise that writes into used directions"

    @property
    def places(self) -> int:
        """Tokens of every example, ``[CLS]`` and ``[SEP]`` among them."""
        return self.length + 2

    @property
    def variables(self) -> dict[str, int]:
        """Every variable with its number of values, in the order of their directions."""
        return {LETTER: len(self.letters), PLACE: self.places, ANSWER: 1, **self.sizes}

    @property
    def total_heads(self) -> int:
        """Heads of the whole model."""
        return self.heads * len(self.layers)


def both(first: tuple[str, int], second: tuple[str, int], to: tuple[str, int]) -> Unit:
    """Whether two variables have these values at once."""
    return Unit({first: 1.0, second: 1.0}, {to: 1.0}, bias=-1.0)


def copied(source: tuple[str, int], to: tuple[str, int], gain: float = 1.0) -> Unit:
    """A value as it is, or times a gain."""
    return Unit({source: gain}, {to: 1.0})


def at_most_one(variable: str, size: int = 1) -> tuple[Unit, ...]:
    """What several heads wrote as if one had: what is above 1 is taken away, so that beyond it nothing has a gradient."""
    return tuple(Unit({(variable, value): 1.0}, {(variable, value): -1.0}, bias=-1.0) for value in range(size))


def from_first_to(place: int) -> Callable[[int, int], bool]:
    """``[CLS]`` looks at one place."""
    return lambda query, key: query == FIRST and key == place
