"""What the data of every task have in common: three splits, a tokenizer, and loaders that resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytorch_lightning as pl
import xxhash
from datasets import Dataset
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from training.config.data import DataOptions
from training.config.data_base import MORE
from training.runs import processes
from training.runs.hashing import add_column
from training.tasks import Task

# The order of training batches, as a pure function of a seed: resumable, shardable, grouped by length.

POOL = 50
"""Batches whose examples are sorted by length together: enough to save padding, few enough to stay random."""


def grouped_batches(lengths: Sequence[int], batch_size: int, *, seed: int) -> list[list[int]]:
    """One epoch of batches of similar length: every example once, the incomplete last batch dropped.

    Args:
        lengths: of every example, in tokens.
        batch_size: examples per batch; if there are fewer examples, one batch holds them all.
        seed: of the order.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    batch_size = min(batch_size, len(order))
    order = order[: len(order) // batch_size * batch_size]
    length = np.asarray(lengths)
    pool = POOL * batch_size
    pools = [order[start : start + pool] for start in range(0, len(order), pool)]
    batches = [
        indices.tolist()
        for members in pools
        for indices in members[np.argsort(length[members], kind="stable")].reshape(-1, batch_size)
    ]
    return [batches[index] for index in random.permutation(len(batches))]


class RunSampler(Sampler[list[int]], ABC):
    """The batches of a training run over several epochs, for one of several processes, which has every ``world``-th example of
    each. Batch i is a function of (seed, i) alone, so that a resumed run can start at any.

    Args:
        per_epoch: batches in an epoch.
        epochs: passes over the data, fractions allowed.
        seed: of the order.
        first: batches to skip, because they were trained on before.
        rank, world: this process and how many there are.
    """

    def __init__(self, per_epoch: int, *, epochs: float, seed: int, first: int, rank: int, world: int) -> None:
        self.per_epoch, self.total = per_epoch, max(1, round(epochs * per_epoch))
        self.seed, self.first, self.rank, self.world = seed, first, rank, world

    @abstractmethod
    def epoch_batches(self, seed: int) -> list[list[int]]:
        """The batches of an epoch, over all processes, from a seed of its own."""

    def __len__(self) -> int:
        """Batches in the whole run, those skipped included."""
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        epoch, batches = -1, []
        for index in range(self.first, self.total):
            if index // self.per_epoch != epoch:
                epoch = index // self.per_epoch
                batches = self.epoch_batches(self.seed * 1_000_003 + epoch)
            yield batches[index % self.per_epoch][self.rank :: self.world]


class RunBatches(RunSampler):
    """All batches of a training run, over several epochs, for one of several processes.

    Batch i is a function of (seed, i) alone. A resumed run starts at ``first``; processes take every ``world``-th
    example of the same global batch, so that two processes see what one with twice the batch size sees.

    Args:
        lengths: of every example, in tokens.
        batch_size: examples per batch and process.
        epochs: passes over the data, fractions allowed.
        seed: of the order.
        first: batches to skip, because they were trained on before.
        rank, world: this process and how many there are.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        *,
        epochs: float,
        seed: int,
        first: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.lengths = lengths
        self.global_batch = batch_size * world
        per_epoch = max(1, len(lengths) // self.global_batch)
        super().__init__(per_epoch, epochs=epochs, seed=seed, first=first, rank=rank, world=world)

    def epoch_batches(self, seed: int) -> list[list[int]]:
        return grouped_batches(self.lengths, self.global_batch, seed=seed)


class StreamBatches(Sampler[list[int]]):
    """All batches of a training run over a stream, as numbers of its blocks, one behind the other, for one of several
    processes, which has every ``world``-th block of each.

    Args:
        per_epoch: blocks of an epoch.
        batch_size: blocks per batch and process.
        epochs: length of the run, fractions allowed.
        first: batches to skip, because they were trained on before.
        rank, world: this process and how many there are.

    >>> list(StreamBatches(6, 1, epochs=1.5, first=1, rank=1, world=2))
    [[3], [5], [7]]
    """

    def __init__(
        self, per_epoch: int, batch_size: int, *, epochs: float, first: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self.size = batch_size * world
        self.total = max(1, round(epochs * max(1, per_epoch // self.size)))
        self.first, self.rank, self.world = first, rank, world

    def __len__(self) -> int:
        """Batches in the whole run, those skipped included."""
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.first * self.size, self.total * self.size, self.size):
            yield list(range(start + self.rank, start + self.size, self.world))


class SplitBatches(Sampler[list[int]]):
    """One pass over a split in order of length, longest first, for one of several processes; every example once."""

    def __init__(self, lengths: Sequence[int], batch_size: int, *, rank: int = 0, world: int = 1) -> None:
        order = np.argsort(-np.asarray(lengths), kind="stable")[rank::world].tolist()
        self.batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


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


# Training batches of about equally many tokens, as a pure function of a seed: resumable, shardable, with little padding.


class RunTokenBatches(RunSampler):
    """All batches of a training run, over several epochs, for one of several processes.

    Pairs are sorted by target and source length, and cut into batches whose longer side, padding included, has at most
    ``batch_tokens`` tokens. Pairs of equal lengths are in a new random order in every epoch, and so are the batches. The
    sorted lengths are the same in every epoch, and with them the cuts: an epoch always has the same number of batches.

    Batch i is a function of (seed, i) alone. A resumed run starts at ``first``; processes take every ``world``-th pair of
    the same global batch of ``world`` times the tokens, and all have equally many in every batch, for which up to
    ``world - 1`` pairs of an epoch are left out.

    Args:
        source, target: lengths of every pair, in tokens.
        batch_tokens: per batch and process; a pair that is longer is a batch of its own.
        epochs: passes over the data, fractions allowed.
        seed: of the order.
        first: batches to skip, because they were trained on before.
        rank, world: this process and how many there are.
    """

    def __init__(
        self,
        source: Sequence[int],
        target: Sequence[int],
        batch_tokens: int,
        *,
        epochs: float,
        seed: int,
        first: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.source, self.target = np.asarray(source), np.asarray(target)
        sorted_by_length = np.lexsort((self.source, self.target))
        longer = np.maximum(self.source, self.target)[sorted_by_length]
        self.cuts = token_cuts(longer.tolist(), batch_tokens * world, multiple=world)
        super().__init__(len(self.cuts), epochs=epochs, seed=seed, first=first, rank=rank, world=world)

    def epoch_batches(self, seed: int) -> list[list[int]]:
        random = np.random.default_rng(seed)
        shuffled = random.permutation(len(self.source))
        order = shuffled[np.lexsort((self.source[shuffled], self.target[shuffled]))]
        batches = [order[start:end] for start, end in self.cuts]
        return [random.permutation(batches[index]).tolist() for index in random.permutation(len(batches))]


def token_cuts(lengths: Sequence[int], budget: int, *, multiple: int = 1) -> list[tuple[int, int]]:
    """Cut a list of lengths into runs of which each, padded to its longest, has at most ``budget`` tokens.

    Args:
        lengths: in the order to cut.
        budget: tokens per run; a run has at least ``multiple`` entries all the same.
        multiple: every run has a multiple of this many entries; fewer than that at the end are left out, unless there would
            be no run at all.

    Returns:
        Start and end of every run.
    """
    cuts: list[tuple[int, int]] = []
    start, longest = 0, 0
    for at in range(0, len(lengths) // multiple * multiple, multiple):
        end = at + multiple
        longest_with = max(longest, *lengths[at:end])
        if at > start and longest_with * (end - start) > budget:
            cuts.append((start, at))
            start, longest_with = at, max(lengths[at:end])
        longest = longest_with
    end = len(lengths) // multiple * multiple
    if end > start:
        cuts.append((start, end))
    return cuts or [(0, len(lengths))]
