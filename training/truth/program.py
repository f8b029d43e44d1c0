"""The language of the programs, after RASP (Weiss, Goldberg and Yahav 2021) and its compiler Tracr (Lindner et al. 2023).

The residual stream of a program holds *variables*. A variable is a block of directions, one for each possible value, and a
known value is a 1 in its place. Embeddings write ``letter`` and ``place``; heads and units write the other variables.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

LETTER, PLACE, ANSWER = "letter", "place", "answer"
FIRST = 0
"""The place of ``[CLS]``: heads without a match attend to it, and the answer is read there."""


@dataclass(frozen=True)
class Head:
    """A head that attends from each place to keys that match a query, and writes the mean of their values.

    Args:
        does: The function of the head; heads with the same name are interchangeable.
        query, key, value: The variables to read.
        to: The variable to write.
        match: The predicate for a value of the query and a value of the key.
        carries: The value to write, with its weight, for each value read (default: the same value).
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
    """A unit of a feed-forward layer: ``relu(reads . state + bias)``, added to the state times ``writes``."""

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
        layers: The layers of heads and units.
        needed: The functions that the answer needs; other heads do not help.
        draw: A function that draws a string with the given answer.
        answer: The function from a string to its answer.
        sizes: The number of values of each further variable that heads and units write.
        heads: The number of heads in every layer; heads that the program does not use are noise.
        cancelling: The number of pairs of loud heads per layer that cancel each other.
        hard: The difficulty of finding the needed heads, in words.
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
        """The number of tokens of every example, with ``[CLS]`` and ``[SEP]``."""
        return self.length + 2

    @property
    def variables(self) -> dict[str, int]:
        """Every variable with its number of values, in the order of their directions."""
        return {LETTER: len(self.letters), PLACE: self.places, ANSWER: 1, **self.sizes}

    @property
    def total_heads(self) -> int:
        return self.heads * len(self.layers)


def both(first: tuple[str, int], second: tuple[str, int], to: tuple[str, int]) -> Unit:
    """Return a unit that fires if two variables have these values at once."""
    return Unit({first: 1.0, second: 1.0}, {to: 1.0}, bias=-1.0)


def copied(source: tuple[str, int], to: tuple[str, int]) -> Unit:
    """Return a unit that copies a value."""
    return Unit({source: 1.0}, {to: 1.0})


def at_most_one(variable: tuple[str, int]) -> Unit:
    """Return a unit that cuts a sum of several heads' outputs at 1, above which nothing has a gradient."""
    return Unit({variable: 1.0}, {variable: -1.0}, bias=-1.0)


def from_first_to(place: int) -> Callable[[int, int], bool]:
    """Return the predicate by which ``[CLS]`` attends to one place."""
    return lambda query, key: query == FIRST and key == place


# The programs of the benchmark, from one layer to eight, by name.
#
# Some heads have copies, and some models hold a second program that the question does not need. Some have loud pairs of heads
# that cancel each other. All have noise heads.

YES = (ANSWER, 0)
NOISE = "noise that writes into used directions"


def _rejected(draw: Callable[[random.Random], str], answer: Callable[[str], bool]) -> Callable[[random.Random, bool], str]:
    """Return a function that draws strings until one has the wanted answer."""

    def drawn(chance: random.Random, yes: bool) -> str:
        while True:
            text = draw(chance)
            if answer(text) == yes:
                return text

    return drawn


def _letters(letters: str, length: int) -> Callable[[random.Random], str]:
    return lambda chance: "".join(chance.choices(letters, k=length))


# -- does a letter occur? ------------------------------------------------------------------------------------------


FINDER = Head("find", PLACE, LETTER, LETTER, "found", lambda query, key: query == FIRST and key == 0, {0: (0, 1.0)})
"""A head by which ``[CLS]`` finds the first letter of the alphabet."""


def _has(name: str, copies: Sequence[int], *, hard: str = NOISE) -> Program:
    """Return a program for the question whether ``a`` occurs, with copies of the needed head in each layer."""
    answered = (copied(("found", 0), YES),)
    layers = [Layer((FINDER,) * count, (at_most_one(("found", 0)),)) for count in copies]
    layers = [Layer((FINDER,), answered)] if sum(copies) == 1 else [*layers, Layer((), answered)]

    def occurs(text: str) -> bool:
        return "a" in text

    def draw(chance: random.Random) -> str:
        with_a = chance.random() >= 0.5
        text = list(_letters("bcd", 8)(chance))
        if with_a:
            text[chance.randrange(8)] = "a"
        return "".join(text)

    return Program(
        name, "does a occur?", "abcd", 8, tuple(layers), ("find",), _rejected(draw, occurs), occurs, {"found": 1}, hard=hard
    )  # fmt: skip


# -- is a the more frequent letter? --------------------------------------------------------------------------------


def _majority() -> Program:
    """Return a program with a head that attends to all letters alike."""
    length = 9
    count = Head("count", PLACE, LETTER, LETTER, "balance", lambda query, key: query == FIRST, {0: (0, 1.0), 1: (0, -1.0)})
    least = 3
    above = Unit({("balance", 0): length / least}, {YES: 1.0})
    beyond = Unit({("balance", 0): length / least}, {YES: -1.0}, bias=-1.0)

    def draw(chance: random.Random) -> str:
        while True:
            text = _letters("ab", length)(chance)
            if abs(text.count("a") - text.count("b")) >= least:
                return text

    def more(text: str) -> bool:
        return text.count("a") > text.count("b")

    return Program(
        "majority", "is a more frequent than b?", "ab", length, (Layer((count,), (above, beyond)),), ("count",),
        _rejected(draw, more), more, {"balance": 1}, hard="the needed head attends everywhere alike",
    )  # fmt: skip


# -- are the first and the last letter the same? -------------------------------------------------------------------


def _same_ends() -> Program:
    letters, length = "abc", 8
    heads = tuple(
        Head(name, PLACE, PLACE, LETTER, name, from_first_to(place)) for name, place in (("first", 1), ("last", length))
    )
    units = tuple(both(("first", value), ("last", value), YES) for value in range(len(letters)))

    def same(text: str) -> bool:
        return text[0] == text[-1]

    return Program(
        "same-ends", "is the first letter the last one too?", letters, length, (Layer(heads, units),), ("first", "last"),
        _rejected(_letters(letters, length), same), same, {"first": 3, "last": 3},
    )  # fmt: skip


# -- does b follow a? ----------------------------------------------------------------------------------------------

LENGTH = 8
PREVIOUS = Head("previous", PLACE, PLACE, LETTER, "before", lambda query, key: FIRST < key == query - 1 < LENGTH)


def _seek(flag: str, to: str, does: str = "seek") -> Head:
    """``[CLS]`` looks for a place where a flag is set."""
    return Head(does, PLACE, flag, flag, to, lambda query, key: query == FIRST)


def _bigram(name: str = "bigram", *, cancelling: int = 0, hard: str = NOISE) -> Program:
    letters, length = "abc", 8

    def follows(text: str) -> bool:
        return "ab" in text

    layers = (
        Layer((PREVIOUS,), (both(("before", 0), (LETTER, 1), ("flag", 0)),)),
        Layer((_seek("flag", "found"),), (copied(("found", 0), YES),)),
    )
    return Program(
        name, "does b follow a anywhere?", letters, length, layers, ("previous", "seek"),
        _rejected(_letters(letters, length), follows), follows, {"before": 3, "flag": 1, "found": 1},
        cancelling=cancelling, hard=hard,
    )  # fmt: skip


# -- does it read the same backwards? ------------------------------------------------------------------------------


def _palindrome() -> Program:
    """Return a program that also has the heads of ``bigram``, which answer another question."""
    letters, length = "abc", 8

    def opposite(query: int, key: int) -> bool:
        return FIRST < query <= length and key == length + 1 - query

    mirror = Head("mirror", PLACE, PLACE, LETTER, "across", opposite)
    pairs = [(own, other) for own in range(3) for other in range(3) if own != other]
    differs = tuple(both((LETTER, own), ("across", other), ("flag", 0)) for own, other in pairs)
    bigram = _bigram().layers[0]
    layers = (
        Layer((mirror, *bigram.heads), (*differs, both(("before", 0), (LETTER, 1), ("other", 0)))),
        Layer(
            (_seek("flag", "found"), _seek("other", "otherwise", "seek-other")),
            (Unit({("found", 0): -1.0}, {YES: 1.0}, bias=1.0),),
        ),
    )  # fmt: skip

    def draw(chance: random.Random) -> str:
        half = _letters(letters, length // 2)(chance)
        text = list(half + half[::-1])
        if chance.random() < 0.5:
            text[chance.randrange(length)] = chance.choice(letters)
        return "".join(text)

    def same(text: str) -> bool:
        return text == text[::-1]

    return Program(
        "palindrome", "does it read the same backwards?", letters, length, layers, ("mirror", "seek"),
        _rejected(draw, same), same, {"across": 3, "flag": 1, "found": 1, "before": 3, "other": 1, "otherwise": 1},
        hard="a second program, bigram, in the same model",
    )  # fmt: skip


# -- what followed the last letter when it came before? ------------------------------------------------------------


def _induction(name: str, *, previous: int = 1, last: int = 1, hard: str = NOISE) -> Program:
    letters, length = "abcdef", 8
    ends = Head("last", PLACE, PLACE, LETTER, "last", from_first_to(length))
    recall = Head("recall", "last", "before", LETTER, "next", lambda query, key: query == key)
    layers = (
        Layer((PREVIOUS,) * previous + (ends,) * last),
        Layer((recall,), tuple(copied(("next", value), YES) for value in range(3))),
    )

    def followed(text: str) -> bool:
        return text[text.index(text[-1]) + 1] in letters[:3]

    def draw(chance: random.Random) -> str:
        last_letter = chance.choice(letters)
        others = letters.replace(last_letter, "")
        text = chance.choices(others, k=length - 1)
        text[chance.randrange(length - 2)] = last_letter
        return "".join([*text, last_letter])

    return Program(
        name, "was the last letter followed by a, b or c before?", letters, length, layers, ("previous", "last", "recall"),
        _rejected(draw, followed), followed, {"before": 6, "last": 6, "next": 6}, hard=hard,
    )  # fmt: skip


# -- where do several jumps lead? ----------------------------------------------------------------------------------


def _jumps(name: str, count: int, *, copies: Sequence[int] = (), hard: str = "depth: each head feeds the next one") -> Program:
    """Every letter is the number of a place; one jump in each layer."""
    letters, length = "12345678", 8
    copies = copies or (1,) * count
    heads = [Head("jump-1", PLACE, PLACE, LETTER, "at-1", from_first_to(1))]
    heads += [
        Head(f"jump-{jump}", f"at-{jump - 1}", PLACE, LETTER, f"at-{jump}", lambda query, key: key == query + 1)
        for jump in range(2, count + 1)
    ]
    layers = [Layer((head,) * copied_so) for head, copied_so in zip(heads[:-1], copies[:-1], strict=True)]
    ending = tuple(copied((f"at-{count}", value), YES) for value in range(4))
    layers.append(Layer((heads[-1],) * copies[-1], ending))

    def ends_low(text: str) -> bool:
        place = 1
        for _ in range(count):
            place = int(text[place - 1])
        return place <= 4

    return Program(
        name, f"do {count} jumps end at places 1 to 4? Each letter names the place of the next", letters, length, tuple(layers),
        tuple(head.does for head in heads), _rejected(_letters(letters, length), ends_low), ends_low,
        {f"at-{jump}": 8 for jump in range(1, count + 1)}, hard=hard,
    )  # fmt: skip


PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        _has("has", [1]),
        _majority(),
        _same_ends(),
        _bigram(),
        _bigram("bigram-undone", cancelling=1, hard="in each layer two loud heads that undo each other"),
        _palindrome(),
        _has("has-copies", [3], hard="three copies of the needed head in one layer"),
        _has("has-backup", [1, 1], hard="a copy of the needed head in the next layer"),
        _induction("induction"),
        _induction("induction-copies", previous=2, last=3, hard="two and three copies of two needed heads"),
        _jumps("jumps-4", 4),
        _jumps("jumps-4-copies", 4, copies=(1, 2, 2, 1), hard="two copies of two needed heads, one feeding the other"),
        _jumps("jumps-8", 8),
    )
}
"""By name, from easy to hard."""
