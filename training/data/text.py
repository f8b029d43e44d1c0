"""Sentences from a hub data set or from local csv, tsv, jsonl or parquet files, gzip included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from gates.errors import GateError
from training.config.data import SentenceFiles, Text
from training.data.classification import ClassificationData
from training.data.files import choose_columns, no_padding, read_table, refuse_broken_quotes
from training.data.hashing import cache_of
from training.data.headers import check_label_headers
from training.data.sentences import SentenceData
from training.tasks.loading import read_tokenizer


class SentenceReader(SentenceData):
    """Single or paired sentences from a hub data set or from local files.

    Args:
        options: what the data are told.
    """

    options: SentenceFiles

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return padding_tokenizer(self.options.tokenizer or backbone)

    def load_splits(self) -> dict[str, Dataset]:
        raw = self._read_files() if self.options.dataset is None else self._read_hub()
        splits = {name: self._choose_columns(name, split) for name, split in raw.items()}
        if "select" not in splits:
            if splits["train"].num_rows < 2:
                raise GateError("the train split has one example; expected more, or a --data.select_file beside it")
            try:
                splits |= set_aside(splits["train"], self.options.select_fraction)
            except ValueError as error:  # one half would be empty
                raise GateError(
                    f"select_fraction is {self.options.select_fraction}, which leaves nothing of {splits['train'].num_rows} "
                    "examples to train on; give a smaller share, or a --data.select_file"
                ) from error
        return splits

    def _read_files(self) -> dict[str, Dataset]:
        options = self.options
        tables = {
            name: read_table(file, options.columns, options.quoting, checked=options.check_header)
            for name, file in options.files.items()
        }
        for file in options.files.values():
            refuse_broken_quotes(file, options.quoting)
        if options.columns is not None and options.check_header:
            labels = {name: choose_columns(name, list(table.columns), options)["label"] for name, table in tables.items()}
            check_label_headers(tables, labels, options.files)
        return {name: Dataset.from_pandas(table, preserve_index=False) for name, table in tables.items()}

    def _read_hub(self) -> dict[str, Dataset]:
        options = self.options
        assert options.dataset is not None
        return read_hub(options.dataset, options.subset, options.split_names, instead="--data.train_file")

    def _choose_columns(self, name: str, split: Dataset) -> Dataset:
        wanted = choose_columns(name, split.column_names, self.options)
        if split.num_rows == 0:
            raise GateError(f"the {name} split is empty; expected at least one example")
        label = split.features[wanted["label"]]
        names = label.names if isinstance(label, datasets.ClassLabel) else None
        called = self.options.split_names[name]  # `datasets` hashes what the function holds, which must not be this module

        def choose(rows: dict[str, list[Any]]) -> dict[str, list[str]]:
            chosen = {new: rows[old] for new, old in wanted.items()}
            for values in chosen.values():
                if None in values:
                    row = {column: own[values.index(None)] for column, own in rows.items()}
                    raise GateError(f"the {name} split has an example without {wanted['text']} or {wanted['label']}: {row}")
            if names is not None:
                if hidden := [label for label in chosen["label"] if not 0 <= label < len(names)]:
                    said = f"{called!r} has hidden labels ({hidden[0]})"
                    raise GateError(f"the {name} split {said}; choose another")
                chosen["label"] = [names[label] for label in chosen["label"]]
            return {new: [str(value).strip() for value in values] for new, values in chosen.items()}

        return split.map(
            choose,
            batched=True,
            remove_columns=split.column_names,
            features=datasets.Features({new: datasets.Value("string") for new in wanted}),
            desc=f"reading {name}",
            load_from_cache_file=False,
        )


class TextData(SentenceReader, ClassificationData):
    """Single or paired sentences with a class each.

    Args:
        options: what the data are told.
    """

    options: Text


def padding_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer of a hub name or local folder, which can fill up batches.

    Raises:
        GateError: if there is none, or it has no token for that.
    """
    if name is None:
        raise GateError("no tokenizer: give --model.backbone or --data.tokenizer")
    tokenizer = read_tokenizer(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise GateError(no_padding(name))
    return tokenizer


def set_aside(split: Dataset, share: float) -> dict[str, Dataset]:
    """A share of the examples, rounded up, for selection, and the rest for training, both shuffled.

    The rows are those of ``datasets``' ``train_test_split``. A table is put into their order at once, where a data set would
    collect them one by one for every reader.

    Raises:
        ValueError: if nothing is left to train on.
    """
    order = np.random.default_rng(0).permutation(split.num_rows)
    select = math.ceil(share * len(order))
    if select >= len(order):
        raise ValueError(share)
    table = split.to_pandas()
    halves = {"train": order[select:], "select": order[:select]}
    return {name: Dataset.from_pandas(table.iloc[rows], preserve_index=False) for name, rows in halves.items()}


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
        loaded = datasets.load_dataset(dataset, subset, cache_dir=cache_of(dataset))
    except Exception as error:  # the hub client raises many kinds of network and lookup errors
        raise GateError(
            f"cannot load the data set {where}: it is neither a local folder nor a hub name that can be reached; "
            f"check the name or the network, or give local files with {instead}"
        ) from error
    assert isinstance(loaded, DatasetDict)
    wanted = {name: split for name, split in split_names.items() if split is not None}
    for name, split in wanted.items():
        if split not in loaded:
            raise GateError(f"the data set {where} has no split {split!r} for {name}; it has {', '.join(loaded)}")
    return {name: loaded[split] for name, split in wanted.items()}


def read_file(file: str, columns: list[str] | None = None, quoting: bool | None = None, *, checked: bool = True) -> Dataset:
    """A local file as a data set; see :func:`training.data.files.read_table`."""
    return Dataset.from_pandas(read_table(file, columns, quoting, checked=checked), preserve_index=False)
