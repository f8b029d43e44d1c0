"""What the data of every task have in common: three splits, a tokenizer, and loaders that resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytorch_lightning as pl
import xxhash
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from training.config.data import DataOptions
from training.config.data_base import MORE
from training.data.batches import SplitBatches
from training.data.hashing import add_column
from training.runs import processes
from training.tasks import Task

SPLITS = ("train", "select", "test")


def with_more_tests(found: Iterable[str]) -> list[str]:
    """The names of the three splits and of the further test splits that are found, in the order in which they are."""
    return [*SPLITS, *(name for name in found if name.startswith(MORE))]


@runtime_checkable
class Batches(Protocol):
    """Batches of row numbers, with the length of the whole run."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Any: ...


class RunLoader(DataLoader[Any]):
    """Tells Lightning that this loader can resume: its batch sampler starts at the trainer's own batch count
    (see :meth:`TaskData.train_dataloader`), so there is no further state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class TaskData(pl.LightningDataModule, ABC):
    """Examples of one task.

    The splits are named for what they are used for: ``train`` for weights and scores, ``select`` for every choice,
    ``test`` for the results. Each has a column ``length``, in tokens, by which batches are grouped.

    Args:
        options: what the data are told.

    Attributes:
        notices: what the user should know of the data once they are built, such as how many examples were left out; a
            sentence each.
    """

    def __init__(self, options: DataOptions) -> None:
        super().__init__()
        self.options = options
        self.seed = options.seed
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.splits: dict[str, Dataset] = {}
        self.notices: list[str] = []

    def order_by(self, seed: int) -> None:
        """Have the order of training batches, and the choice of examples on which heads are scored, depend on the seed of a
        run too: it is added to the data's own. To be called once, before the first loader is made."""
        self.seed += seed

    @property
    def processor(self) -> Any:
        """What makes a model's inputs of texts or images, once the data are built: the tokenizer, where there are texts."""
        return self.tokenizer

    @property
    @abstractmethod
    def score_batch_size(self) -> int:
        """Examples per batch when heads are scored."""

    def check_backbone(self, config: Any, name: str) -> None:
        """Raises :class:`GateError` if a model of this config, called ``name``, cannot be of the task; by default any can."""

    @abstractmethod
    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        """Read, check and tokenize everything; does nothing the second time.

        Args:
            backbone: whose tokenizer to use.
            stated_labels: class names of a fine-tuned backbone, whose order is then kept.

        Raises:
            GateError: for whatever is wrong with the tokenizer or the data.
        """

    def use_files_of(self, run: Path) -> None:
        """Take what an earlier run made for its data from its directory, before :meth:`build`; by default there is nothing."""

    def write_files(self, run: Path) -> None:
        """Keep what was made for the data in the run's directory; by default nothing."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """The task these data are of, once they are built."""

    @abstractmethod
    def collate(self, split: str) -> Any:
        """What makes a batch of rows of a split: a function that worker processes of any start method can have."""

    @abstractmethod
    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> Batches:
        """The training batches of one of several processes, a function of (seed, position) alone, from ``first`` on."""

    def train_dataloader(self) -> DataLoader[Any]:
        """The whole run: every batch of every epoch, from where a resumed run stands."""
        first = 0
        if self.trainer is not None:
            first = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
        return self._loader("train", self.run_batches(first), self.training_rows)

    @property
    def training_rows(self) -> Any:
        """What training batches are made of, by number: the rows of the training split."""
        return self.splits["train"]

    def run_batches(self, first: int = 0) -> Batches:
        """The batches of this process over the whole run; the trainer's module says how many epochs that is."""
        epochs = 1.0 if self.trainer is None else getattr(self.trainer.lightning_module, "epochs", 1.0)
        rank, world = self._place()
        return self.batches_of_run(epochs=epochs, first=first, rank=rank, world=world)

    def validation_interval(self, epochs: float) -> float:
        """Share of a run between validations: once per epoch."""
        return min(1.0, 1.0 / epochs)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._split_loader("select", self.options.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._split_loader("test", self.options.eval_batch_size)

    @property
    def more_tests(self) -> list[str]:
        """Further splits for results, such as ``test_mismatched``, by name; mostly none."""
        return sorted(name for name in self.splits if name.startswith(MORE))

    def more_test_dataloader(self, split: str) -> DataLoader[Any]:
        """One of :attr:`more_tests`."""
        return self._split_loader(split, self.options.eval_batch_size)

    def score_dataloader(self) -> DataLoader[Any]:
        """The training examples on which heads are scored: a random choice of ``score_rows``."""
        if "score" not in self.splits:
            rows = np.random.default_rng(self.seed).permutation(self.splits["train"].num_rows)[: self.options.score_rows]
            self.splits["score"] = self.splits["train"].select(np.sort(rows))
        return self._split_loader("score", self.score_batch_size)

    def score_places(self) -> range:
        """The number that each example of this process's :meth:`score_dataloader` has among those of all processes, in its
        order; the numbers count all of them from 0."""
        rank, world = self._place()
        return range(rank, min(self.options.score_rows, self.splits["train"].num_rows), world)

    def calibration_dataloaders(self, rows: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Two disjoint halves of ``rows`` training examples chosen at random, other ones than :meth:`score_dataloader`'s as
        far as there are enough."""
        order = np.random.default_rng(self.seed).permutation(self.splits["train"].num_rows)
        chosen = np.roll(order, -self.options.score_rows)[:rows]
        loaders = []
        for name, half in (("propose", chosen[::2]), ("decide", chosen[1::2])):
            self.splits[name] = self.splits["train"].select(np.sort(half))
            loaders.append(self._split_loader(name, self.score_batch_size))
        return loaders[0], loaders[1]

    @property
    def order(self) -> str:
        """All that decides on the order of training batches, beside the data."""
        return f"{self.score_batch_size} {self.options.score_rows} {self.seed}"

    def fingerprint(self) -> str:
        """A hash of the encoded splits and of the order of training batches."""
        digest = xxhash.xxh3_128(self.order.encode())
        for name in (*SPLITS, *self.more_tests):
            for column in self.splits[name].column_names:
                digest.update(f"{name} ".encode())
                add_column(digest, self.splits[name], column)
        return digest.hexdigest()

    def _place(self) -> tuple[int, int]:
        """Which of how many processes this is; heads may be scored before any trainer has had the data."""
        if self.trainer is None:
            return processes.rank(), processes.world_size()
        return self.trainer.global_rank, self.trainer.world_size

    def _split_loader(self, split: str, batch_size: int) -> DataLoader[Any]:
        rank, world = self._place()
        return self._loader(split, SplitBatches(self.splits[split]["length"][:], batch_size, rank=rank, world=world))

    def _loader(self, split: str, batches: Any, rows: Any = None) -> DataLoader[Any]:
        return RunLoader(
            self.splits[split] if rows is None else rows,
            batch_sampler=batches,
            collate_fn=self.collate(split),
            num_workers=self.options.num_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            persistent_workers=False,
        )
