"""Text classification from a hub data set or from local csv, tsv, jsonl or parquet files, gzip included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.vocabulary import check_vocabulary
from training.config.data import Text
from training.data.classification import ClassificationData
from training.data.files import choose_columns, no_padding, read_table
from training.data.headers import check_label_headers


class TextData(ClassificationData):
    """Single or paired sentences from a hub data set or from local files.

    Args:
        options: what the data are told.
    """

    options: Text

    def __init__(self, options: Text) -> None:
        super().__init__(options)

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        name = self.options.tokenizer or backbone
        if name is None:
            raise GateError("no tokenizer: give --model.backbone or --data.tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise GateError(
                f"cannot load a tokenizer from {name!r}: it is neither a folder with tokenizer files nor a hub name that can "
                "be reached; check the path or the network"
            ) from error
        check_vocabulary(tokenizer, repr(name))
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if tokenizer.pad_token is None:
            raise GateError(no_padding(name))
        return tokenizer

    def load_splits(self) -> dict[str, Dataset]:
        raw = self._read_files() if self.options.dataset is None else self._read_hub()
        splits = {name: self._choose_columns(name, split) for name, split in raw.items()}
        if "select" not in splits:
            if splits["train"].num_rows < 2:
                raise GateError("the train split has one example; expected more, or a --data.select_file beside it")
            halves = splits["train"].train_test_split(self.options.select_fraction, seed=0)
            splits["train"], splits["select"] = halves["train"], halves["test"]
        return splits

    def _read_files(self) -> dict[str, Dataset]:
        options = self.options
        tables = {
            name: read_table(file, options.columns, options.quoting, checked=options.check_header)
            for name, file in options.files.items()
        }
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

        def choose(row: dict[str, Any]) -> dict[str, str]:
            chosen = {new: row[old] for new, old in wanted.items()}
            if any(value is None for value in chosen.values()):
                raise GateError(f"the {name} split has an example without {wanted['text']} or {wanted['label']}: {row}")
            if names is not None:
                if not 0 <= chosen["label"] < len(names):
                    hidden = f"{self.options.split_names[name]!r} has hidden labels ({chosen['label']})"
                    raise GateError(f"the {name} split {hidden}; choose another")
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


def read_file(file: str, columns: list[str] | None = None, quoting: bool | None = None, *, checked: bool = True) -> Dataset:
    """A local file as a data set; see :func:`training.data.files.read_table`."""
    return Dataset.from_pandas(read_table(file, columns, quoting, checked=checked), preserve_index=False)
