"""What every classification data set has in common: classes, and batches of a fixed number of examples."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from gates.export.vocabulary import check_known
from training.config.data import ClassificationOptions
from training.data.base import SPLITS, TaskData
from training.data.batches import RunBatches
from training.data.encoding import encode
from training.data.files import check_classes
from training.tasks import Classification

AT_ONCE = 10_000
"""Examples that are encoded together, which the tokenizer's library shares among the processor's cores."""


class _Collate:
    """Pads a batch to its longest example (a class, so that workers of any start method can have it)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad = DataCollatorWithPadding(tokenizer, return_tensors="pt")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.pad([{name: value for name, value in row.items() if name != "length"} for row in rows]))


class ClassificationData(TaskData):
    """Sentences or pairs of sentences with a class each. Subclasses read them as columns ``text``, optionally ``pair``,
    and ``label``.

    Args:
        options: what the data are told.
    """

    options: ClassificationOptions

    def __init__(self, options: ClassificationOptions) -> None:
        super().__init__(options)
        self.labels: list[str] = []

    @property
    def score_batch_size(self) -> int:
        return self.options.batch_size

    @abstractmethod
    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        """The tokenizer, by default of a hub name or local folder."""

    @abstractmethod
    def load_splits(self) -> dict[str, Dataset]:
        """The splits as columns ``text``, ``label`` and optionally ``pair``."""

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        self.tokenizer = self.load_tokenizer(backbone)
        raw = self.load_splits()
        self.labels = _ordered(_classes(raw), stated_labels)
        self.splits = {name: self._encode(name, raw[name]) for name in SPLITS}
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def _encode(self, name: str, split: Dataset) -> Dataset:
        index = {label: position for position, label in enumerate(self.labels)}
        tokenizer = self.tokenizer
        assert tokenizer is not None
        limit = min(self.options.max_length, tokenizer.model_max_length)

        def encoded(rows: dict[str, list[Any]]) -> dict[str, Any]:
            found: dict[str, list[Any]] = dict(encode(tokenizer, rows["text"], rows.get("pair"), limit=limit))
            found["labels"] = [index[label] for label in rows["label"]]
            found["length"] = [len(ids) for ids in found["input_ids"]]
            return found

        return split.map(
            encoded, batched=True, batch_size=AT_ONCE, remove_columns=split.column_names, desc=f"tokenizing {name}"
        )

    @property
    def task(self) -> Classification:
        return Classification(self.labels)

    def collate(self, split: str) -> _Collate:
        assert self.tokenizer is not None
        return _Collate(self.tokenizer)

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> RunBatches:
        lengths = self.splits["train"]["length"][:]
        return RunBatches(lengths, self.options.batch_size, epochs=epochs, seed=self.seed, first=first, rank=rank, world=world)

    @property
    def per_epoch(self) -> int:
        """Training batches of one pass over the data."""
        batches = self.run_batches()
        assert isinstance(batches, RunBatches)
        return batches.per_epoch


def _ordered(labels: list[str], stated: list[str] | None) -> list[str]:
    """The labels in the order that a fine-tuned model states, where it states the same ones."""
    position = {name.lower(): index for index, name in enumerate(stated or [])}
    if {label.lower() for label in labels} == set(position):
        return sorted(labels, key=lambda label: position[label.lower()])
    return labels


def _classes(splits: dict[str, Dataset]) -> list[str]:
    """The classes of the training split, sorted; other splits must not have more."""
    found = {name: splits[name]["label"][:] for name in SPLITS}  # sliced, since a column gives its values one by one otherwise
    labels = sorted(set(found["train"]), key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
    check_classes(found)
    return labels
