"""Words with tags from CoNLL columns, CoNLL-U, jsonl and parquet files, gzip included.

This module does not load PyTorch, so a wrong file is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gates.errors import GateError
from training.config.data import Tags
from training.data.files import check_text, check_there, ending_of, find_column, open_text, read_table

COLUMN_FILES = (".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2")
LIST_FILES = (".jsonl", ".parquet")
TAGS_OF_CONLLU = {"upos": 3, "xpos": 4, "deprel": 7}
"""Columns of CoNLL-U with tags, from 0."""


class Tagged(NamedTuple):
    """A sentence: words with their tags."""

    words: list[str]
    tags: list[str]


def read_tagged(file: str, options: Tags) -> list[Tagged]:
    """Read the sentences of a local file in the format of its ending."""
    check_there(file)
    ending = ending_of(file).lower()
    if ending in LIST_FILES:
        table = read_table(file)
        words, tags = choose_lists(repr(file), [str(name) for name in table.columns], options)
        return tagged_lists(table[words].tolist(), table[tags].tolist(), repr(file))
    if ending not in (*COLUMN_FILES, ".conllu"):
        known = ", ".join((*COLUMN_FILES, ".conllu", *LIST_FILES))
        raise GateError(f"the data file {file!r} has the ending {ending!r}; expected one of {known}, or one of these with .gz")
    check_text(file)
    with open_text(file) as stream:
        blocks = list(sentence_blocks(stream))
    found = list((_conllu if ending == ".conllu" else _columns)(file, blocks, options))
    if not found:
        raise GateError(f"the data file {file!r} has no sentence; expected a line for each word, with its tag")
    return found


def choose_lists(where: str, columns: Sequence[str], options: Tags) -> tuple[str, str]:
    """Return the names of the columns of words and of tags."""
    usual = ("tags", "ner_tags", "upos", "pos_tags", "labels")
    words = find_column(where, "words", columns, options.words_column, ("tokens", "words"))
    return words, find_column(where, "tags", columns, options.tags_column, usual)


def tagged_lists(words: Sequence[Any], tags: Sequence[Any], where: str) -> list[Tagged]:
    """Return sentences from lists of words and of tags."""
    found = []
    for row, (own, theirs) in enumerate(zip(words, tags, strict=True), 1):
        place = f"example {row} of {where}"
        for values, what in ((own, "words"), (theirs, "tags")):
            if not isinstance(values, (list, tuple, np.ndarray)):
                raise GateError(f"the {what} of {place} are {str(values)[:60]!r}; expected a list")
        if len(own) != len(theirs) or not len(own):
            raise GateError(f"{place} has {len(own)} words and {len(theirs)} tags; expected a tag for each word")
        for word in own:
            if not isinstance(word, str):
                raise GateError(f"{place} has the word {word!r}; expected a text")
        for tag in theirs:
            if isinstance(tag, (bool, float)) or tag is None or not str(tag).strip():
                raise GateError(f"{place} has the tag {tag!r}; expected a name")
        found.append(Tagged(list(own), [str(tag) for tag in theirs]))
    return found


Block = list[tuple[int, str]]
"""The lines of a sentence with their numbers."""


def sentence_blocks(lines: Iterable[str]) -> Iterator[Block]:
    """Yield the lines between blank ones, with their numbers."""
    block: Block = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            block.append((number, line.rstrip("\r\n")))
        elif block:
            yield block
            block = []
    if block:
        yield block


def conllu_fields(line: str, where: str) -> list[str]:
    """Return the ten columns of a line of CoNLL-U."""
    fields = line.split("\t")
    if len(fields) != 10:
        raise GateError(f"{where} has {len(fields)} columns; expected the 10 of CoNLL-U, with tabs between them")
    return fields


def _columns(file: str, blocks: list[Block], options: Tags) -> Iterator[Tagged]:
    """Yield the sentences of CoNLL columns, separated by tabs, or by spaces in lines without tabs.

    A line that begins with ``#`` and has another number of columns is a comment.
    """
    width = next((len(_fields(line)) for block in blocks for _, line in block if not line.startswith("#")), 0)
    words, tags = _places(file, width, options)
    for block in blocks:
        own = Tagged([], [])
        for number, line in block:
            fields = _fields(line)
            if line.startswith("#") and len(fields) != width:
                continue
            if len(fields) != width:
                raise GateError(
                    f"line {number} of {file!r} has {len(fields)} columns; expected {width} as in the first line, and a blank "
                    "line between sentences"
                )
            own.words.append(fields[words])
            own.tags.append(_named(fields[tags], number, file))
        if own.words and own.words[0] != "-DOCSTART-":  # where a document of CoNLL-2003 begins
            yield own


def _fields(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else line.split()


def _places(file: str, width: int, options: Tags) -> tuple[int, int]:
    """Return the numbers of the columns of words and tags, from 0."""
    if width < 2:
        raise GateError(f"{file!r} has {width} columns; expected words and tags, with tabs or spaces between them")
    found = []
    for role, given, usual in (("words", options.words_column, 1), ("tags", options.tags_column, width)):
        if given is not None and not (given.isdecimal() and 1 <= int(given) <= width):
            raise GateError(
                f"{role}_column is {given!r}, but {file!r} has {width} columns; expected a number from 1 to {width}"
            )
        found.append(int(given or usual) - 1)
    if found[0] == found[1]:
        raise GateError(f"words and tags are both column {found[0] + 1} of {file!r}; name different ones")
    return found[0], found[1]


def _conllu(file: str, blocks: list[Block], options: Tags) -> Iterator[Tagged]:
    """Yield the syntactic words of CoNLL-U; skip tokens of several words and empty nodes."""
    wanted = options.tags_column or "upos"
    if wanted not in TAGS_OF_CONLLU or options.words_column not in (None, "form"):
        given = f"tags_column is {wanted!r}" if wanted not in TAGS_OF_CONLLU else f"words_column is {options.words_column!r}"
        raise GateError(f"{given}, but {file!r} is CoNLL-U; expected tags {', '.join(TAGS_OF_CONLLU)}, and words form")
    for block in blocks:
        own = Tagged([], [])
        for number, line in block:
            fields = [] if line.startswith("#") else conllu_fields(line, f"line {number} of {file!r}")
            if fields and fields[0].isdecimal():
                tag = fields[TAGS_OF_CONLLU[wanted]]
                own.words.append(fields[1])
                own.tags.append(_named("" if tag == "_" else tag, number, file))
        if own.words:
            yield own


def _named(tag: str, number: int, file: str) -> str:
    if not tag.strip():
        raise GateError(f"line {number} of {file!r} has no tag; expected one for each word")
    return tag.strip()


def check_tags(sentences: Mapping[str, Sequence[Tagged]], stated: Sequence[str] | None = None) -> list[str]:
    """Return the tags of a fine-tuned model if they include all tags of the training split; otherwise these, sorted."""
    own = sorted({tag for sentence in sentences["train"] for tag in sentence.tags})
    if spaced := next((tag for tag in own if len(tag.split()) > 1), None):
        raise GateError(f"the train split has the tag {spaced!r}; expected tags without spaces")
    if len(own) < 2:
        raise GateError(f"all training words have the tag {own[0]!r}; expected at least two tags")
    for name, split in sentences.items():
        for row, sentence in enumerate(split, 1):
            if not set(sentence.tags) <= set(own):
                place = next(place for place, tag in enumerate(sentence.tags) if tag not in own)
                more = f" and {len(own) - 12} more" if len(own) > 12 else ""
                raise GateError(
                    f"the {name} split has the tag {sentence.tags[place]!r} (sentence {row}, word {place + 1}); expected a tag "
                    f"of the training split ({', '.join(own[:12])}{more}); correct the file or the column"
                )
    return list(stated) if stated is not None and set(own) <= set(stated) else own
