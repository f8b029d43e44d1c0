"""Translation from a hub data set, from two aligned files for each split, or from tsv, csv, jsonl or parquet files."""

from __future__ import annotations

import gzip
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from datasets import Dataset

from gates.errors import GateError
from training.data.text import check_text, read_file, read_hub, refuse_blank_lines
from training.data.translation import Pairs, TranslationData, chosen

ASIDE_AT_MOST = 2000
"""Source sentences."""


class ParallelTextData(TranslationData):
    """Sentences and their translations.

    Args:
        dataset: hub name of a data set, such as ``wmt16``.
        subset: its configuration, such as ``de-en``.
        train_split, select_split, test_split: names of its splits; without ``select_split`` (or a file for it) a part of
            the training pairs is set aside.
        train_source, train_target, select_source, select_target, test_source, test_target: local text files with a sentence
            on each line, line i of the target being the translation of line i of the source; ``.gz`` is unpacked.
        train_file, select_file, test_file: instead, local csv, tsv, jsonl or parquet files with a column for each side.
        columns: names of the columns of a csv or tsv file that has no header line.
        source_column, target_column: of the two sides; in data sets with one column ``translation``, the languages in it.
        select_fraction: share of the training pairs set aside for selection when there is no split for it, at most 2,000.
        skip_empty: leave out training pairs with an empty side, instead of refusing them. ``skip_unfit_pairs`` is the same for
            pairs of the other splits.
        kwargs: see :class:`training.data.translation.TranslationData`.
    """

    def __init__(
        self,
        dataset: str | None = None,
        subset: str | None = None,
        train_split: str = "train",
        select_split: str | None = None,
        test_split: str = "test",
        train_source: str | None = None,
        train_target: str | None = None,
        select_source: str | None = None,
        select_target: str | None = None,
        test_source: str | None = None,
        test_target: str | None = None,
        train_file: str | None = None,
        select_file: str | None = None,
        test_file: str | None = None,
        columns: list[str] | None = None,
        source_column: str = "source",
        target_column: str = "target",
        select_fraction: float = 0.02,
        skip_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.aligned = {
            "train": (train_source, train_target),
            "select": (select_source, select_target),
            "test": (test_source, test_target),
        }
        self.files = {"train": train_file, "select": select_file, "test": test_file}
        for name, (source, target) in self.aligned.items():
            if (source is None) != (target is None):
                given, lacking = ("source", "target") if target is None else ("target", "source")
                raise GateError(f"--data.{name}_{given} is given but --data.{name}_{lacking} is not; parallel text needs both")
            if source is not None and self.files[name] is not None:
                raise GateError(
                    f"--data.{name}_source and --data.{name}_file are both given; give aligned files or one file with columns"
                )
        local = [name for name in self.files if self.files[name] is not None or self.aligned[name][0] is not None]
        if (dataset is None) == ("train" not in local):
            raise GateError(
                "give either a hub data set (--data.dataset) or local text (--data.train_source and --data.train_target, or "
                "--data.train_file), not both or neither"
            )
        if dataset is None and "test" not in local:
            raise GateError(
                "there is training text but no test text; give --data.test_source and --data.test_target, or --data.test_file"
            )
        if not 0 < select_fraction < 1:
            raise GateError(f"select_fraction is {select_fraction}; expected a share between 0 and 1")
        self.dataset, self.subset = dataset, subset
        self.split_names = {"train": train_split, "select": select_split, "test": test_split}
        self.columns, self.source_column, self.target_column = columns, source_column, target_column
        self.select_fraction, self.skip_empty = select_fraction, skip_empty

    def load_pairs(self) -> dict[str, Pairs]:
        if self.dataset is None:
            names = [name for name in self.files if self.files[name] or self.aligned[name][0]]
            pairs = {name: self._read_local(name) for name in names}
        else:
            hub = read_hub(self.dataset, self.subset, self.split_names, instead="--data.train_source and --data.train_target")
            pairs = {name: self._from_columns(name, split) for name, split in hub.items()}
        pairs = {name: self._without_empty(name, split) for name, split in pairs.items()}
        if "select" not in pairs:
            pairs["train"], pairs["select"] = set_aside(pairs["train"], self.select_fraction)
            self.set_aside = True
        return pairs

    def _read_local(self, name: str) -> Pairs:
        source, target = self.aligned[name]
        if source is not None and target is not None:
            return read_aligned(source, target)
        file = self.files[name]
        assert file is not None
        split = read_file(file, self.columns)
        if not self._may_skip_empty(name):
            refuse_blank_lines(file)
        return self._from_columns(name, split)

    def _from_columns(self, name: str, split: Dataset) -> Pairs:
        found = {column: list(split[column]) for column in split.column_names}
        if "translation" in found and self.source_column not in found:
            rows = [{} if row is None else row for row in found["translation"]]
            if any(rows) and all(isinstance(row, dict) for row in rows):
                found = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        for column in (self.source_column, self.target_column):
            if column not in found:
                raise GateError(
                    f"the {name} split has no column {column!r}; it has {', '.join(map(repr, found))}. Set "
                    "--data.source_column and --data.target_column, or --data.columns if there is no header"
                )
        return Pairs(*(_texts(name, column, found[column]) for column in (self.source_column, self.target_column)))

    def _may_skip_empty(self, name: str) -> bool:
        return self.skip_empty if name == "train" else self.skip_unfit_pairs

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
    if not path.is_file():
        raise GateError(f"the data file {file!r} does not exist; check the path")
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
