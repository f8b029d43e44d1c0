"""Sentences from a hub dataset or from local csv, tsv, jsonl or parquet files, gzip included."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import datasets
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.checkpoint import check_known
from training.config.data import POSITIVE, ClassificationOptions, Glue, Ratings, SentenceFiles, SentenceOptions, Text
from training.config.data_base import HubSplits
from training.data.base import TaskData, set_aside_rows, with_more_tests
from training.data.files import (
    check_label_headers,
    choose_columns,
    read_table,
    refuse_broken_quotes,
    refuse_empty_labels,
)
from training.data.labels import check_classes, check_numbers
from training.runs.hashing import cache_of
from training.runs.progress import track
from training.tasks import Classification, Regression
from training.tasks.loading import read_tokenizer


class _Collate:
    """Pad a batch to its longest example. A class can be pickled for workers of any start method."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad = DataCollatorWithPadding(tokenizer, return_tensors="pt")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.pad([{name: value for name, value in row.items() if name != "length"} for row in rows]))


class SentenceData(TaskData):
    """Sentences or pairs of sentences with a label each, a class or a number."""

    options: SentenceOptions

    @abstractmethod
    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        """Return the tokenizer."""

    @abstractmethod
    def load_splits(self) -> dict[str, Dataset]:
        """Return the splits with the text columns ``text``, ``label`` and optionally ``pair``."""

    @abstractmethod
    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> Mapping[str, float]:
        """Return the number that stands for each label of the splits in a batch.

        Args:
            stated_labels: The names of the classes in the order of a fine-tuned model.
        """

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        self.tokenizer = self.load_tokenizer(backbone)
        raw = self.load_splits()
        self._check_length(raw["train"].column_names)
        names = with_more_tests(raw)
        has_labels = "label" in raw["train"].column_names
        # Slicing reads a column at once.
        found = {name: raw[name]["label"][:] if has_labels else [""] * len(raw[name]) for name in names}
        numbers = self.numbers_of(found, stated_labels)
        self.splits = {name: self._encode(name, raw[name], numbers) for name in names}
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def _check_length(self, columns: list[str]) -> None:
        assert self.tokenizer is not None
        texts = 2 if "pair" in columns else 1
        special = self.tokenizer.num_special_tokens_to_add(pair=texts == 2)
        if self.options.max_length < special + texts:
            raise GateError(
                f"max_length is {self.options.max_length}, and the tokenizer adds {special} special tokens; expected at least "
                f"{special + texts}"
            )

    def _encode(self, name: str, split: Dataset, numbers: Mapping[str, float]) -> Dataset:
        tokenizer = self.tokenizer
        assert tokenizer is not None
        limit = min(self.options.max_length, tokenizer.model_max_length)

        def encoded(rows: dict[str, list[Any]]) -> dict[str, Any]:
            texts = [rows[column] for column in ("text", "pair") if column in rows]
            found = dict(tokenizer(*texts, truncation=True, max_length=limit, return_attention_mask=False))
            found["labels"] = [numbers[label] for label in rows.get("label", [""] * len(rows["text"]))]
            found["length"] = [len(ids) for ids in found["input_ids"]]
            return found

        return split.map(
            encoded,
            batched=True,
            batch_size=10_000,  # enough for the tokenizer to use all cores
            remove_columns=split.column_names,
            desc=f"tokenizing {name}",
        )

    def details(self) -> list[str]:
        assert self.tokenizer is not None
        limit = min(self.options.max_length, self.tokenizer.model_max_length)
        lengths = [length for name in with_more_tests(self.splits) for length in self.splits[name]["length"][:]]
        full = sum(length == limit for length in lengths)
        if not full:
            return []
        return [f"{full:,} of {len(lengths):,} texts fill {limit} tokens, where longer ones are cut (--data.max_length)"]

    def collate(self, split: str) -> _Collate:
        assert self.tokenizer is not None
        return _Collate(self.tokenizer)


class ClassificationData(SentenceData):
    """Sentences or pairs of sentences with a class each."""

    options: ClassificationOptions

    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> dict[str, float]:
        """Return the number of each class; see :func:`ordered_classes`."""
        numbers, self.labels = ordered_classes(check_classes(labels), stated_labels, self.options)
        return numbers

    @property
    def task(self) -> Classification:
        return Classification(self.labels, self.options.metric)


def ordered_classes(
    classes: list[str], stated_labels: list[str] | None, options: ClassificationOptions
) -> tuple[dict[str, float], list[str]]:
    """Return the number of each class, and the classes: in the order of a fine-tuned model with the same ones, or sorted."""
    position = {name.lower(): index for index, name in enumerate(stated_labels or [])}
    are_stated = {label.lower() for label in classes} == set(position)
    labels = sorted(classes, key=lambda label: position[label.lower()]) if are_stated else classes
    if options.metric == "binary_f1":
        labels = _positive_last(labels, options.positive, are_stated=are_stated)
    return {label: position for position, label in enumerate(labels)}, labels


def _positive_last(labels: list[str], positive: str | None, *, are_stated: bool) -> list[str]:
    if len(labels) != 2:
        raise GateError(f"--data.metric binary_f1 needs two classes, but there are {len(labels)}; choose f1, the mean over all")
    names = " and ".join(map(repr, labels))
    chosen = positive or POSITIVE
    if chosen not in labels:
        raise GateError(f"positive is {chosen!r}, but the classes are {names}; give one of them with --data.positive")
    if are_stated and labels[1] != chosen:
        raise GateError(
            f"the model states the classes {names} in this order, and binary_f1 is for the second; give --data.positive "
            f"{labels[1]!r}, or choose f1"
        )
    return [label for label in labels if label != chosen] + [chosen]


class SentenceReader(SentenceData):
    """Single or paired sentences from a hub dataset or from local files."""

    options: SentenceFiles
    columns: list[str]

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return padding_tokenizer(self.options.tokenizer or backbone)

    def load_splits(self) -> dict[str, Dataset]:
        options = self.options
        raw = self._read_files() if options.dataset is None else read_hub(options, instead="--data.train_file")
        splits = {name: self._choose_columns(name, split) for name, split in raw.items()}
        if "select" not in splits:
            if splits["train"].num_rows < 2:
                raise GateError("the train split has one example; expected more, or a --data.select_file")
            splits |= set_aside(splits["train"], options.select_fraction)
            self.set_aside = True
        return splits

    def details(self) -> list[str]:
        return [f"columns {', '.join(map(repr, self.columns))}", *super().details()]

    def _read_files(self) -> dict[str, Dataset]:
        options = self.options
        tables = {
            name: read_table(file, options.columns, options.quoting, checked=options.check_header)
            for name, file in options.files.items()
        }
        for name, file in options.files.items():
            refuse_broken_quotes(file, tables[name], options.quoting)
        if options.has_labels:
            labels = {name: choose_columns(name, list(table.columns), options)["label"] for name, table in tables.items()}
            if options.columns is not None and options.check_header:
                check_label_headers(tables, labels, options.files)
            for name, table in tables.items():
                refuse_empty_labels(options.files[name], table, labels[name])
        return {name: Dataset.from_pandas(table, preserve_index=False) for name, table in tables.items()}

    def _choose_columns(self, name: str, split: Dataset) -> Dataset:
        wanted = choose_columns(name, split.column_names, self.options)
        self.columns = list(wanted.values())
        if split.num_rows == 0:
            raise GateError(f"the {name} split is empty; expected at least one example")
        feature = split.features[wanted["label"]] if "label" in wanted else None
        # Outside `choose`, because `datasets` hashes all that the function refers to.
        where = f"the {name} split {self.options.split_names[name]!r}"

        def choose(rows: dict[str, list[Any]]) -> dict[str, list[str]]:
            chosen = {new: rows[old] for new, old in wanted.items()}
            for values in chosen.values():
                if None in values:
                    row = {column: own[values.index(None)] for column, own in rows.items()}
                    raise GateError(f"the {name} split has an example without {' or '.join(wanted.values())}: {row}")
            if "label" in chosen:
                chosen["label"] = named_labels(chosen["label"], feature, where)
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
    """Single or paired sentences with a class each."""

    options: Text

    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> dict[str, float]:
        if not self.options.unlabelled:
            return super().numbers_of(labels, stated_labels)
        if stated_labels is None:
            raise GateError("unlabelled is true, but no fine-tuned model is there to label; give --model.backbone")
        self.labels = stated_labels
        return {"": 0}  # until label_by

    @torch.no_grad()
    def label_by(self, model: PreTrainedModel) -> None:
        """Take the classes that a model predicts as labels, in evaluation mode on its device."""
        for name, split in self.splits.items():
            collate, found = self.collate(name), list[int]()
            for start in track(range(0, len(split), self.options.eval_batch_size), f"labelling {name}"):
                rows = split.select(range(start, min(start + self.options.eval_batch_size, len(split)))).to_list()
                batch = {key: value.to(model.device) for key, value in collate(rows).items()}
                found += model.eval()(**self.task.model_inputs(model, batch)).logits.argmax(-1).tolist()
            self.splits[name] = split.remove_columns("labels").add_column("labels", found)
        self.notices.append(
            f"the labels are predictions of the model, so {self.options.metric} says how often a pruned model agrees with it"
        )


class RatingsData(SentenceReader):
    """Single or paired sentences with a number each, such as how alike two sentences are."""

    options: Ratings

    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> dict[str, float]:
        """Return the number that each label is."""
        return check_numbers(labels)

    @property
    def task(self) -> Regression:
        return Regression(self.options.metric)


def glue_data(options: Glue) -> SentenceReader:
    """Return the data module of a task of GLUE."""
    sentences = options.sentences
    return RatingsData(sentences) if isinstance(sentences, Ratings) else TextData(sentences)


def padding_tokenizer(name: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a hub name or local folder, with a padding token."""
    if name is None:
        raise GateError("no tokenizer: give --model.backbone or --data.tokenizer")
    tokenizer = read_tokenizer(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise GateError(
            f"the tokenizer of {name!r} has no padding, end or unknown token to pad with; give another with "
            "--data.tokenizer, or set pad_token in its tokenizer_config.json"
        )
    return tokenizer


def set_aside(split: Dataset, share: float) -> dict[str, Dataset]:
    """Return a share of the examples for selection and the rest for training, both shuffled; see :func:`set_aside_rows`.

    The rows are those of ``datasets``' ``train_test_split``. A table is reordered once; a ``Dataset`` would look up each row at
    every read.
    """
    halves = zip(("train", "select"), set_aside_rows(split.num_rows, share, "examples"), strict=True)
    table = split.to_pandas()
    return {name: Dataset.from_pandas(table.iloc[rows], preserve_index=False) for name, rows in halves}


def read_hub(options: HubSplits, *, instead: str) -> dict[str, Dataset]:
    """Return the splits of a dataset from the hub or a local folder; ``instead`` names the options for local files."""
    assert options.dataset is not None
    where = f"{options.dataset!r}" + (f" ({options.subset})" if options.subset else "")
    try:
        loaded = datasets.load_dataset(options.dataset, options.subset, cache_dir=cache_of(options.dataset))
    except Exception as error:  # the hub client raises many kinds of network and lookup errors
        raise GateError(
            f"cannot load the dataset {where}, which is neither a local folder nor a reachable hub name; check the name or "
            f"the network, or give local files with {instead}"
        ) from error
    assert isinstance(loaded, DatasetDict)
    wanted = {name: split for name, split in options.split_names.items() if split is not None}
    for name, split in wanted.items():
        if split not in loaded:
            raise GateError(f"the dataset {where} has no split {split!r} for {name}; it has {', '.join(loaded)}")
    return {name: loaded[split] for name, split in wanted.items()}


def named_labels(labels: list[Any], feature: Any, where: str) -> list[Any]:
    """Return labels by the names of their classes, if the feature of the column has names."""
    if not isinstance(feature, datasets.ClassLabel):
        return labels
    try:
        return list(feature.int2str(labels))
    except ValueError as error:
        raise GateError(f"{where} has hidden labels; choose another") from error


def read_file(file: str, columns: list[str] | None = None, **more: bool) -> Dataset:
    """Read a local file as a dataset; see :func:`training.data.files.read_table`."""
    return Dataset.from_pandas(read_table(file, columns, **more), preserve_index=False)
