"""Text classification from a hub data set or from local csv, tsv, jsonl or parquet files, gzip included."""

from __future__ import annotations

import csv
import gzip
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import datasets
import pandas as pd
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gates.errors import GateError
from training.data.classification import ClassificationData

FORMATS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".jsonl": "json", ".parquet": "parquet"}


class TextClassificationData(ClassificationData):
    """Single or paired sentences from a hub data set (``dataset``) or from local files (``train_file``, ...).

    Args:
        dataset: hub name of a data set, such as ``glue``.
        subset: its configuration, such as ``sst2``.
        train_split, select_split, test_split: names of its splits; without ``select_split`` (or ``select_file``)
            a part of the training data is set aside.
        train_file, select_file, test_file: local csv, tsv, jsonl or parquet files; ``.gz`` is unpacked.
        columns: names of the columns of a csv or tsv file that has no header line.
        quoting: whether fields of a csv or tsv file may be in double quotes; by default csv yes, tsv no.
        text_column: the sentence.
        pair_column: the second sentence, if there is one.
        label_column: the class, a number or a word.
        select_fraction: share of the training data set aside for selection when there is no split for it.
        tokenizer: hub name or folder; by default the backbone's.
        kwargs: see :class:`training.data.classification.ClassificationData`.
    """

    def __init__(
        self,
        dataset: str | None = None,
        subset: str | None = None,
        train_split: str = "train",
        select_split: str | None = None,
        test_split: str = "test",
        train_file: str | None = None,
        select_file: str | None = None,
        test_file: str | None = None,
        columns: list[str] | None = None,
        quoting: bool | None = None,
        text_column: str = "sentence",
        pair_column: str | None = None,
        label_column: str = "label",
        select_fraction: float = 0.1,
        tokenizer: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (dataset is None) == (train_file is None):
            raise GateError(
                "give either a hub data set (--data.dataset) or local files (--data.train_file), not both or neither"
            )
        if train_file is not None and test_file is None:
            raise GateError("--data.train_file is given but --data.test_file is not; results need a test file")
        if not 0 < select_fraction < 1:
            raise GateError(f"select_fraction is {select_fraction}; expected a share between 0 and 1")
        self.dataset, self.subset = dataset, subset
        self.split_names = {"train": train_split, "select": select_split, "test": test_split}
        self.files = {"train": train_file, "select": select_file, "test": test_file}
        self.columns, self.quoting = columns, quoting
        self.text_column, self.pair_column, self.label_column = text_column, pair_column, label_column
        self.select_fraction = select_fraction
        self.tokenizer_name = tokenizer

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        name = self.tokenizer_name or backbone
        if name is None:
            raise GateError("no tokenizer: give --model.backbone or --data.tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise GateError(
                f"cannot load a tokenizer from {name!r}: it is neither a folder with tokenizer files nor a hub name that can "
                "be reached; check the path or the network"
            ) from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        return tokenizer

    def load_splits(self) -> dict[str, Dataset]:
        raw = self._read_files() if self.dataset is None else self._read_hub()
        splits = {name: self._choose_columns(name, split) for name, split in raw.items()}
        if "select" not in splits:
            if splits["train"].num_rows < 2:
                raise GateError("the train split has one example; expected more, or a --data.select_file beside it")
            halves = splits["train"].train_test_split(self.select_fraction, seed=0)
            splits["train"], splits["select"] = halves["train"], halves["test"]
        return splits

    def _read_files(self) -> dict[str, Dataset]:
        return {name: read_file(file, self.columns, self.quoting) for name, file in self.files.items() if file is not None}

    def _read_hub(self) -> dict[str, Dataset]:
        assert self.dataset is not None
        return read_hub(self.dataset, self.subset, self.split_names, instead="--data.train_file")

    def _choose_columns(self, name: str, split: Dataset) -> Dataset:
        wanted = {"text": self.text_column, "label": self.label_column}
        if self.pair_column is not None:
            wanted["pair"] = self.pair_column
        for column in wanted.values():
            if column not in split.column_names:
                raise GateError(
                    f"the {name} split has no column {column!r}; it has {', '.join(map(repr, split.column_names))}. "
                    "Set --data.text_column, --data.pair_column or --data.label_column, or --data.columns if there is no header"
                )
        if split.num_rows == 0:
            raise GateError(f"the {name} split is empty; expected at least one example")
        label = split.features[self.label_column]
        names = label.names if isinstance(label, datasets.ClassLabel) else None

        def choose(row: dict[str, Any]) -> dict[str, str]:
            chosen = {new: row[old] for new, old in wanted.items()}
            if any(value is None for value in chosen.values()):
                raise GateError(f"the {name} split has an example without {self.text_column} or {self.label_column}: {row}")
            if names is not None:
                if not 0 <= chosen["label"] < len(names):
                    raise GateError(
                        f"the {name} split {self.split_names[name]!r} has hidden labels ({chosen['label']}); choose another"
                    )
                chosen["label"] = names[chosen["label"]]
            return {new: str(value).strip() for new, value in chosen.items()}

        return split.map(choose, remove_columns=split.column_names, desc=f"reading {name}", load_from_cache_file=False)


def read_hub(dataset: str, subset: str | None, split_names: Mapping[str, str | None], *, instead: str) -> dict[str, Dataset]:
    """The splits of a data set from the hub or a local folder.

    Args:
        dataset: hub name or folder.
        subset: its configuration.
        split_names: of the splits to read, by our names; None for one that is not there.
        instead: options for local files, to name in an error.

    Raises:
        GateError: if it cannot be loaded or lacks a split.
    """
    where = f"{dataset!r}" + (f" ({subset})" if subset else "")
    try:
        loaded = datasets.load_dataset(dataset, subset)
    except Exception as error:  # the hub client raises many kinds of network and lookup errors
        raise GateError(
            f"cannot load the data set {where}: it is neither a local folder nor a hub name that can be reached; "
            f"check the name or the network, or give local files with {instead}"
        ) from error
    assert isinstance(loaded, DatasetDict)
    wanted = {name: split for name, split in split_names.items() if split is not None}
    for split in wanted.values():
        if split not in loaded:
            raise GateError(f"the data set {where} has no split {split!r}; it has {', '.join(loaded)}")
    return {name: loaded[split] for name, split in wanted.items()}


def read_file(file: str, columns: list[str] | None = None, quoting: bool | None = None) -> Dataset:
    """Read one local file by its ending.

    Args:
        file: ``.csv``, ``.tsv``, ``.txt`` (as tsv), ``.jsonl`` or ``.parquet``, each also with ``.gz``.
        columns: names of the columns when there is no header line.
        quoting: whether csv fields may be quoted; by default yes for csv and no for tsv.

    Raises:
        GateError: missing, empty, of unknown format, not UTF-8, or not what its ending says.
    """
    path = Path(file)
    if not path.is_file():
        raise GateError(f"the data file {file!r} does not exist; check the path")
    ending = _ending(path)
    kind = FORMATS.get(ending.lower())
    if kind is None:
        raise GateError(
            f"the data file {file!r} has the ending {ending!r}; expected one of {', '.join(FORMATS)}, or one of these with .gz"
        )
    check_text(path, kind)
    try:
        if kind == "parquet":
            table = pd.read_parquet(path)
        elif kind == "json":
            table = pd.read_json(path, lines=True, dtype=False, encoding="utf-8")
        else:
            table = _read_columns(path, columns, quoting)
        return Dataset.from_pandas(table, preserve_index=False)
    except GateError:
        raise
    except Exception as error:  # pandas and arrow raise many kinds for damaged files
        raise GateError(f"the data file {file!r} cannot be read as {kind}: {str(error).strip().splitlines()[0]}") from error


def _read_columns(path: Path, columns: list[str] | None, quoting: bool | None) -> pd.DataFrame:
    """A csv or tsv file as texts; see :func:`read_file`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pd.errors.ParserWarning)
        separator, quotes = _dialect(path, quoting)
        table = pd.read_csv(
            path,
            sep=separator,
            quoting=quotes,
            dtype=str,
            keep_default_na=False,
            names=columns,
            header=0 if columns is None else None,
            index_col=False,
            encoding="utf-8",
        )
    if caught:  # rows longer than the header, whose ends pandas has cut
        width = len(table.columns)
        for line, row in _rows(path, separator, quotes):
            if any(row[width:]):
                raise GateError(
                    f"line {line} of {str(path)!r} has {len(row)} fields and the file {width} columns; name every column in "
                    "the header or with --data.columns, and see that no text contains the separator"
                )
    return table


def refuse_blank_lines(file: str) -> None:
    """Raises :class:`GateError` for a csv or tsv file with blank lines between its rows, which :func:`read_file` passes over:
    in parallel text they may stand for a sentence that got lost. At the end they do no harm; other kinds of files have none."""
    path = Path(file)
    if FORMATS.get(_ending(path).lower()) != "csv":
        return
    blank = None
    for line, row in _rows(path, *_dialect(path, None)):
        if len(row) < 2 and not "".join(row).strip():
            blank = blank or line
        elif blank is not None:
            raise GateError(f"line {blank} of {file!r} is blank; remove it, or give it both sides")


def _ending(path: Path) -> str:
    """What a file is, by its name without ``.gz``."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _dialect(path: Path, quoting: bool | None) -> tuple[str, Literal[0, 3]]:
    """The separator, and csv's constant for quoting."""
    comma = _ending(path) == ".csv"
    return "," if comma else "\t", csv.QUOTE_MINIMAL if (comma if quoting is None else quoting) else csv.QUOTE_NONE


def _rows(path: Path, separator: str, quotes: Literal[0, 3]) -> Iterator[tuple[int, list[str]]]:
    """The fields of every row, blank ones included, with the number of the line where it ends."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=separator, quoting=quotes)
        try:
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as error:
            raise GateError(f"the data file {str(path)!r} cannot be read (line {reader.line_num}): {error}") from error


def check_text(path: Path, kind: str) -> None:
    """Empty files and files that are not UTF-8 text, named before a reader stumbles over them."""
    opener = gzip.open if path.suffix == ".gz" else open
    number, empty = 0, True
    try:
        with opener(path, "rb") as stream:
            for line in stream:
                number += 1
                empty = empty and not line.strip()
                if kind != "parquet":
                    line.decode("utf-8")
                    if b"\0" in line:
                        raise GateError(
                            f"the data file {str(path)!r} has NUL characters (line {number}), as UTF-16 has; convert it to "
                            "UTF-8, for example with iconv"
                        )
    except UnicodeDecodeError as error:
        raise GateError(
            f"the data file {str(path)!r} is not UTF-8 (line {number}); convert it, for example with iconv"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise GateError(f"the data file {str(path)!r} is not a complete gzip file: {error}") from error
    if empty:
        raise GateError(f"the data file {str(path)!r} is empty; expected at least one example")
