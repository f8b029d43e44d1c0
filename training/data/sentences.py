"""What sentences, or pairs of sentences, have in common: batches of a fixed number of examples, grouped by length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from torch import Tensor
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from gates.errors import GateError
from gates.export.vocabulary import check_known
from training.config.data import SentenceOptions
from training.data.base import TaskData, with_more_tests
from training.data.batches import RunBatches
from training.data.encoding import encode

AT_ONCE = 10_000
"""Examples that are encoded together, which the tokenizer's library shares among the processor's cores."""


class _Collate:
    """Pads a batch to its longest example (a class, so that workers of any start method can have it)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad = DataCollatorWithPadding(tokenizer, return_tensors="pt")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.pad([{name: value for name, value in row.items() if name != "length"} for row in rows]))


class SentenceData(TaskData):
    """Sentences or pairs of sentences with a label each, a class or a number. Subclasses read them as columns ``text``,
    optionally ``pair``, and ``label``, all of them texts.

    Args:
        options: what the data are told.
    """

    options: SentenceOptions

    @property
    def score_batch_size(self) -> int:
        return self.options.batch_size

    @abstractmethod
    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        """The tokenizer, by default of a hub name or local folder."""

    @abstractmethod
    def load_splits(self) -> dict[str, Dataset]:
        """The splits as columns ``text``, ``label`` and optionally ``pair``."""

    @abstractmethod
    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> Mapping[str, float]:
        """What stands for each label of the splits in a batch.

        Args:
            labels: of the examples of each split.
            stated_labels: names of the classes in their order, where the model's configuration states them.

        Raises:
            GateError: for labels that are none of this task.
        """

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        self.tokenizer = self.load_tokenizer(backbone)
        raw = self.load_splits()
        self._check_length(raw["train"].column_names)
        names = with_more_tests(raw)
        found = {name: raw[name]["label"][:] for name in names}  # sliced, since a column gives its values one by one otherwise
        numbers = self.numbers_of(found, stated_labels)
        self.splits = {name: self._encode(name, raw[name], numbers) for name in names}
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def _check_length(self, columns: list[str]) -> None:
        """Raises :class:`GateError` if nothing of a text is left beside the special tokens."""
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
            found: dict[str, list[Any]] = dict(encode(tokenizer, rows["text"], rows.get("pair"), limit=limit))
            found["labels"] = [numbers[label] for label in rows["label"]]
            found["length"] = [len(ids) for ids in found["input_ids"]]
            return found

        return split.map(
            encoded, batched=True, batch_size=AT_ONCE, remove_columns=split.column_names, desc=f"tokenizing {name}"
        )

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
