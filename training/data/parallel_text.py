"""Translation from a hub data set, from two aligned files for each split, or from tsv, csv, jsonl or parquet files."""

from __future__ import annotations

import gzip
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from datasets import Dataset

from gates.errors import GateError
from training.config.data import ParallelText
from training.data.files import check_text, check_there, refuse_blank_lines
from training.data.text import read_file, read_hub
from training.data.translation import Pairs, TranslationData, chosen

ASIDE_AT_MOST = 2000
"""Source sentences."""


class ParallelTextData(TranslationData):
    """Sentences and their translations.

    Args:
        options: what the data are told.
    """

    options: ParallelText

    def __init__(self, options: ParallelText) -> None:
        super().__init__(options)

    def load_pairs(self) -> dict[str, Pairs]:
        options = self.options
        if options.dataset is None:
            pairs = {name: self._read_local(name, files) for name, files in options.local.items()}
        else:
            instead = "--data.train_source and --data.train_target"
            hub = read_hub(options.dataset, options.subset, options.split_names, instead=instead)
            pairs = {name: self._from_columns(name, split) for name, split in hub.items()}
        pairs = {name: self._without_empty(name, split) for name, split in pairs.items()}
        if "select" not in pairs:
            pairs["train"], pairs["select"] = set_aside(pairs["train"], self.options.select_fraction)
            self.set_aside = True
        return pairs

    def _read_local(self, name: str, files: tuple[str, ...]) -> Pairs:
        if len(files) == 2:
            return read_aligned(*files)
        (file,) = files
        split = read_file(file, self.options.columns, checked=self.options.check_header)
        if not self._may_skip_empty(name):
            refuse_blank_lines(file)
        return self._from_columns(name, split)

    def _from_columns(self, name: str, split: Dataset) -> Pairs:
        found = {column: list(split[column]) for column in split.column_names}
        if "translation" in found and self.options.source_column not in found:
            rows = [{} if row is None else row for row in found["translation"]]
            if any(rows) and all(isinstance(row, dict) for row in rows):
                found = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        columns = (self.options.source_column, self.options.target_column)
        for column in columns:
            if column not in found:
                raise GateError(
                    f"the {name} split has no column {column!r}; it has {', '.join(map(repr, found))}. Set "
                    "--data.source_column and --data.target_column, or --data.columns if there is no header"
                )
        return Pairs(
            *(_texts(name, column, found[column]) for column in (self.options.source_column, self.options.target_column))
        )

    def _may_skip_empty(self, name: str) -> bool:
        return self.options.skip_empty if name == "train" else self.options.skip_unfit_pairs

    def _without_empty(self, name: str, pairs: Pairs) -> Pairs:
        """Empty lines refused, or left out of the training pairs if that is asked for."""
        whole = [bool(source and target) for source, target in zip(*pairs, strict=True)]
        if not any(whole):
            raise GateError(f"the {name} split is empty; expected at least one pair of sentences")
        if all(whole):
            return pairs
        if not self._may_skip_empty(name):
            at = whole.index(False)
            side = "target" if pairs.source[at] else "source"
            option = "skip_empty" if name == "train" else "skip_unfit_pairs"
            raise GateError(
                f"the {side} of pair {at + 1} of the {name} split is empty ({whole.count(False)} in all); remove that pair "
                f"from both sides, or set --data.{option} true"
            )
        self.notices.append(f"{whole.count(False)} of {len(whole)} {name} pairs are left out: a side of them is empty")
        return chosen(pairs, np.flatnonzero(whole))


def _texts(name: str, column: str, values: list[Any]) -> list[str]:
    """A column as texts without the white space around them; numbers as they are written, nothing as an empty text."""
    for row, value in enumerate(values, start=1):
        if not isinstance(value, str | int | float | None):
            raise GateError(
                f"{column!r} of pair {row} of the {name} split is {shorten(repr(value), 60)}, not a text; expected one sentence"
            )
    return ["" if value is None else str(value).strip() for value in values]


def read_aligned(source: str, target: str) -> Pairs:
    """Two text files, line by line.

    Raises:
        GateError: if one is missing, empty, not UTF-8, not whole, or they have different numbers of lines.
    """
    pairs = Pairs(read_lines(source), read_lines(target))
    if len(pairs.source) != len(pairs.target):
        raise GateError(
            f"{source!r} has {len(pairs.source)} lines and {target!r} has {len(pairs.target)}; line i of one must be the "
            "translation of line i of the other"
        )
    return pairs


def read_lines(file: str) -> list[str]:
    """The lines of a text file, ``.gz`` too, without the white space around them. Only line feeds end lines: other
    characters that Unicode takes for a line's end stay within it, and line i stays line i.

    Raises:
        GateError: if it is missing, empty, not UTF-8 or not whole.
    """
    path = Path(file)
    check_there(file)
    check_text(path, "text")
    content = (gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes())
    lines = content.decode("utf-8-sig").split("\n")
    return [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]


def set_aside(pairs: Pairs, fraction: float) -> tuple[Pairs, Pairs]:
    """A part of the pairs for selection, chosen at random; pairs with the same source are all on one side. More than
    :data:`ASIDE_AT_MOST` would only make every validation, which translates them, longer."""
    sources = list(dict.fromkeys(pairs.source))
    if len(sources) < 2:
        raise GateError("the train split has one source sentence; expected more, or a selection split beside it")
    order = np.random.default_rng(0).permutation(len(sources))
    taken = {sources[index] for index in order[: min(len(sources) - 1, ASIDE_AT_MOST, max(1, round(fraction * len(sources))))]}
    aside = np.array([source in taken for source in pairs.source])
    return chosen(pairs, np.flatnonzero(~aside)), chosen(pairs, np.flatnonzero(aside))
