"""What every classification data set has in common: three splits, a tokenizer, classes and loaders."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import xxhash
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from gates.errors import GateError
from training.data.batches import RunBatches, SplitBatches

SPLITS = ("train", "select", "test")


class _Collate:
    """Pads a batch to its longest example (a class, so that workers of any start method can have it)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad = DataCollatorWithPadding(tokenizer, return_tensors="pt")

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return dict(self.pad([{name: value for name, value in row.items() if name != "length"} for row in rows]))


class RunLoader(DataLoader[Any]):
    """Tells Lightning that this loader can resume: its batch sampler starts at the trainer's own batch count
    (see :meth:`ClassificationData.train_dataloader`), so there is no further state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class ClassificationData(pl.LightningDataModule, ABC):
    """Sentences or pairs of sentences with a class each.

    The splits are named for what they are used for: ``train`` for weights and scores, ``select`` for every choice,
    ``test`` for the results. Subclasses read them as columns ``text``, optionally ``pair``, and ``label``.

    Args:
        batch_size: examples per step and device.
        eval_batch_size: examples per batch in evaluation.
        score_rows: training examples, chosen at random, on which heads are scored.
        max_length: longest input in tokens; longer ones are truncated.
        num_workers: processes that prepare batches.
        seed: of the order of training batches.
    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        eval_batch_size: int = 128,
        score_rows: int = 2048,
        max_length: int = 128,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {
            "batch_size": batch_size,
            "eval_batch_size": eval_batch_size,
            "score_rows": score_rows,
            "max_length": max_length,
        }
        for name, value in sizes.items():
            if value < 1:
                raise GateError(f"{name} is {value}; expected at least 1")
        if num_workers < 0:
            raise GateError(f"num_workers is {num_workers}; expected 0 or more")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.score_rows = score_rows
        self.max_length = max_length
        self.num_workers = num_workers
        self.seed = seed
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.labels: list[str] = []
        self.splits: dict[str, Dataset] = {}

    @abstractmethod
    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        """The tokenizer, by default of a hub name or local folder."""

    @abstractmethod
    def load_splits(self) -> dict[str, Dataset]:
        """The splits as columns ``text``, ``label`` and optionally ``pair``."""

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        """Read, check and tokenize everything; does nothing the second time.

        Args:
            backbone: whose tokenizer to use.
            stated_labels: class names of a fine-tuned backbone, whose order is then kept.

        Raises:
            GateError: for whatever is wrong with the tokenizer or the data.
        """
        if self.splits:
            return
        self.tokenizer = self.load_tokenizer(backbone)
        raw = self.load_splits()
        self.labels = _ordered(_classes(raw), stated_labels)
        self.splits = {name: self._encode(name, raw[name]) for name in SPLITS}

    def _encode(self, name: str, split: Dataset) -> Dataset:
        index = {label: position for position, label in enumerate(self.labels)}
        tokenizer = self.tokenizer
        assert tokenizer is not None
        limit = min(self.max_length, tokenizer.model_max_length)

        def encode(rows: dict[str, list[Any]]) -> dict[str, Any]:
            pair = [rows["pair"]] if "pair" in rows else []
            encoded = tokenizer(rows["text"], *pair, truncation=True, max_length=limit)
            encoded["labels"] = [index[label] for label in rows["label"]]
            encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
            return dict(encoded)

        return split.map(encode, batched=True, remove_columns=split.column_names, desc=f"tokenizing {name}")

    def train_dataloader(self) -> DataLoader[Any]:
        """The whole run: every batch of every epoch, from where a resumed run stands."""
        first = 0
        if self.trainer is not None:
            first = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
        return self._loader("train", self.run_batches(first))

    def run_batches(self, first: int = 0) -> RunBatches:
        """The batches of this process over the whole run; the trainer's module says how many epochs that is."""
        epochs, rank, world = 1.0, 0, 1
        if self.trainer is not None:
            epochs = getattr(self.trainer.lightning_module, "epochs", 1.0)
            rank, world = self.trainer.global_rank, self.trainer.world_size
        lengths = self.splits["train"]["length"]
        return RunBatches(lengths, self.batch_size, epochs=epochs, seed=self.seed, first=first, rank=rank, world=world)

    def validation_interval(self, epochs: float) -> float:
        """Share of a run between validations: once per epoch."""
        return min(1.0, 1.0 / epochs)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._split_loader("select", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._split_loader("test", self.eval_batch_size)

    def score_dataloader(self) -> DataLoader[Any]:
        """The training examples on which heads are scored: a random choice of ``score_rows``."""
        if "score" not in self.splits:
            rows = np.random.default_rng(self.seed).permutation(self.splits["train"].num_rows)[: self.score_rows]
            self.splits["score"] = self.splits["train"].select(np.sort(rows))
        return self._split_loader("score", self.batch_size)

    def calibration_dataloaders(self, rows: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Two disjoint halves of ``rows`` training examples chosen at random, other ones than :meth:`score_dataloader`'s as
        far as there are enough."""
        order = np.random.default_rng(self.seed).permutation(self.splits["train"].num_rows)
        chosen = np.roll(order, -self.score_rows)[:rows]
        loaders = []
        for name, half in (("propose", chosen[::2]), ("decide", chosen[1::2])):
            self.splits[name] = self.splits["train"].select(np.sort(half))
            loaders.append(self._split_loader(name, self.batch_size))
        return loaders[0], loaders[1]

    def fingerprint(self) -> str:
        """A hash of the encoded splits and of all that decides on the order of training batches."""
        digest = xxhash.xxh3_128(f"{self.batch_size} {self.score_rows} {self.seed}".encode())
        for name in SPLITS:
            for column in self.splits[name].column_names:
                digest.update(f"{name} {column} {json.dumps(list(self.splits[name][column]))}".encode())
        return digest.hexdigest()

    def _split_loader(self, split: str, batch_size: int) -> DataLoader[Any]:
        rank, world = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        return self._loader(split, SplitBatches(self.splits[split]["length"], batch_size, rank=rank, world=world))

    def _loader(self, split: str, batches: Any) -> DataLoader[Any]:
        assert self.tokenizer is not None
        return RunLoader(
            self.splits[split],
            batch_sampler=batches,
            collate_fn=_Collate(self.tokenizer),
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=False,
        )


def _ordered(labels: list[str], stated: list[str] | None) -> list[str]:
    """The labels in the order that a fine-tuned model states, where it states the same ones."""
    position = {name.lower(): index for index, name in enumerate(stated or [])}
    if {label.lower() for label in labels} == set(position):
        return sorted(labels, key=lambda label: position[label.lower()])
    return labels


def _classes(splits: dict[str, Dataset]) -> list[str]:
    """The classes of the training split, sorted; other splits must not have more."""
    labels = sorted(
        set(splits["train"]["label"]), key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label)
    )
    if len(labels) > max(2, 0.9 * len(splits["train"])):
        raise GateError(
            f"the label column has {len(labels)} different values in {len(splits['train'])} training examples (such as "
            f"{labels[0]!r}); expected classes, not numbers to predict"
        )
    if "" in labels:
        raise GateError("the training split has an example with an empty label; give every example a class")
    if len(labels) < 2:
        raise GateError(f"all training examples have the label {labels[0]!r}; expected at least two classes")
    for name in SPLITS:
        unknown = sorted(set(splits[name]["label"]) - set(labels))
        if unknown:
            row = list(splits[name]["label"]).index(unknown[0]) + 1
            raise GateError(
                f"the {name} split has the label {unknown[0]!r} (example {row}), which is not among the classes of the "
                f"training split ({', '.join(map(repr, labels))}); correct the file or the label column"
            )
    return labels
