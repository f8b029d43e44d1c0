"""Gold trees from a treebank in CoNLL-U, the format of Universal Dependencies."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import conllu
from conllu.exceptions import ParseException

from gates.errors import GateError
from training.data.files import check_text, check_there

COLUMNS = 10
UNCOUNTED = ("root", "punct", "dep", "list", "parataxis", "orphan", "goeswith", "reparandum")
"""Relations that are looked at only if they are asked for: those of Universal Dependencies' groups loose, special and other,
which hold the items of a list or the parts of a broken word together. Subtypes are left out with them."""


@dataclass(frozen=True)
class Tree:
    """A sentence with its basic dependencies.

    Args:
        words: the syntactic words, in order.
        heads: of each word, by number from 0; -1 for the root.
        relations: of each word to its head, subtypes included, such as ``nsubj:pass``.
    """

    words: list[str]
    heads: list[int]
    relations: list[str]


def read_treebank(file: str) -> list[Tree]:
    """The sentences of a CoNLL-U file, also with ``.gz``.

    Of a token of several words, such as German *zum*, the words are taken, to which the trees refer; empty nodes and enhanced
    dependencies, which are a layer of their own, are passed over.

    Raises:
        GateError: for a file that is missing, empty, not UTF-8 or no CoNLL-U, with the line.
    """
    check_there(file, "treebank")
    check_text(Path(file), "text")
    opener = gzip.open if file.endswith(".gz") else open
    with opener(file, "rt", encoding="utf-8-sig", newline="\n") as stream:
        trees = trees_in(stream, repr(file))
    if not trees:
        raise GateError(f"the treebank {file!r} has no sentence; expected CoNLL-U, ten columns with tabs between them")
    return trees


def trees_in(lines: Iterable[str], where: str) -> list[Tree]:
    """The sentences in lines of CoNLL-U; see :func:`read_treebank`.

    Args:
        lines: with or without their ends.
        where: what errors call their place.

    Raises:
        GateError: for what is no CoNLL-U.
    """
    return [_tree(where, line, block) for line, block in _blocks(lines)]


def relations_of(trees: Sequence[Tree], wanted: Sequence[str] = ()) -> list[str]:
    """Relations between words, the most frequent first.

    Args:
        trees: of a treebank.
        wanted: these alone, in this order; by default all but :data:`UNCOUNTED`.

    Raises:
        GateError: for one that the treebank does not have.
    """
    counts = Counter(relation for tree in trees for relation in tree.relations)
    for relation in wanted:
        if relation not in counts:
            raise GateError(f"the treebank has no relation {relation!r}; it has {', '.join(sorted(counts)) or 'none'}")
    usual = [relation for relation, _ in counts.most_common() if relation.partition(":")[0] not in UNCOUNTED]
    return list(wanted) or usual


def _blocks(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """The lines of every sentence without comments, with the number of its first line; comments are kept as empty lines."""
    first = 1
    block: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\r\n")
        if not text.strip():
            if any(block):
                yield first, block
            first, block = number + 1, []
        else:
            block.append("" if text.startswith("#") else text)
    if any(block):
        yield first, block


def _tree(place: str, first: int, block: Sequence[str]) -> Tree:
    """The tree of a sentence.

    Args:
        place: as errors call it.
        first: number of its first line.
        block: its lines; empty ones are comments.
    """
    words: list[str] = []
    heads: list[int] = []
    relations: list[str] = []
    lines: list[int] = []
    for number, text in enumerate(block, start=first):
        if not text:
            continue
        where = f"line {number} of {place}"
        fields = text.split("\t")
        if len(fields) != COLUMNS:
            raise GateError(f"{where} has {len(fields)} columns; expected the {COLUMNS} of CoNLL-U, with tabs between them")
        try:
            token = conllu.parse("\t".join([*fields[:8], "_", "_"]) + "\n")[0][0]
        except (ParseException, IndexError, ValueError) as error:
            raise GateError(f"{where} is not CoNLL-U: {' '.join(str(error).split())}") from error
        if not isinstance(token["id"], int):  # a token of several words, or an empty node
            continue
        if token["id"] != len(words) + 1:
            raise GateError(
                f"{where} has the ID {token['id']}; expected {len(words) + 1}, as words count from 1 in each sentence"
            )
        if not fields[1].strip():
            raise GateError(f"{where} has no word in its second column; expected one, or _ for a word that is not known")
        if token["head"] is None or not token["deprel"] or token["deprel"] == "_":
            raise GateError(f"{where} has no head or relation; expected a treebank with dependencies")
        words.append(fields[1])
        heads.append(token["head"] - 1)
        relations.append(token["deprel"])
        lines.append(number)
    _check(place, first, heads, lines)
    return Tree(words, heads, relations)


def _check(where: str, first: int, heads: Sequence[int], lines: Sequence[int]) -> None:
    """Raises :class:`GateError` for what is no tree."""
    if not heads:
        raise GateError(f"the sentence at line {first} of {where} has no words; expected a line for each word")
    for head, line in zip(heads, lines, strict=True):
        if not -1 <= head < len(heads):
            raise GateError(
                f"line {line} of {where} has the head {head + 1}; expected 0 to {len(heads)}, words of the sentence"
            )
    if -1 not in heads:
        raise GateError(f"the sentence at line {first} of {where} has no root; expected a word whose head is 0")
    for word, line in enumerate(lines):
        place, steps = word, 0
        while place >= 0 and steps <= len(heads):
            place, steps = heads[place], steps + 1
        if place >= 0:
            raise GateError(f"line {line} of {where} is part of a cycle, or leads to one; expected a tree up to the root")
