"""Base classes for the data of every task: three splits, a tokenizer, and loaders that resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import xxhash
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedTokenizerBase

from gates.errors import GateError
from training.config.data_base import MORE, DataOptions
from training.runs import processes
from training.runs.hashing import add_column
from training.tasks import Task
from training.tasks.loading import read_tokenizer

# The order of training batches, as a pure function of a seed: resumable, shardable, grouped by length.


def grouped_batches(lengths: Sequence[int], batch_size: int, *, seed: int) -> list[list[int]]:
    """Return one epoch of batches of similar length: every example once, the incomplete last batch dropped.

    Args:
        batch_size: The examples per batch; if there are fewer examples, one batch holds them all.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    batch_size = min(batch_size, len(order))
    order = order[: len(order) // batch_size * batch_size]
    length = np.asarray(lengths)
    pool = 50 * batch_size  # sorted by length together: enough to save padding, few enough to stay random
    pools = [order[start : start + pool] for start in range(0, len(order), pool)]
    batches = [
        indices.tolist()
        for members in pools
        for indices in members[np.argsort(length[members], kind="stable")].reshape(-1, batch_size)
    ]
    return [batches[index] for index in random.permutation(len(batches))]


class RunSampler(Sampler[list[int]], ABC):
    """The batches of row numbers of a training run over several epochs, for one of several processes.

    Batch i is a function of (seed, i) alone, so a resumed run starts at ``first``. Each process takes every ``world``-th
    example of the same global batch: two processes see the same examples as one with twice the batch size.

    Args:
        epochs: The number of passes over the data; fractions are allowed.
        first: The number of batches to skip, because they were trained on before.
        rank, world: The number of this process and of all processes.
    """

    def __init__(self, per_epoch: int, *, epochs: float, seed: int = 0, first: int = 0, rank: int = 0, world: int = 1) -> None:
        self.per_epoch, self.total = per_epoch, max(1, round(epochs * per_epoch))
        self.seed, self.first, self.rank, self.world = seed, first, rank, world

    @abstractmethod
    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Return the batches of an epoch over all processes."""

    def seed_of(self, epoch: int) -> int:
        return self.seed * 1_000_003 + epoch

    def __len__(self) -> int:
        """Return the number of batches in the whole run, those skipped included."""
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        epoch, batches = -1, []
        for index in range(self.first, self.total):
            if index // self.per_epoch != epoch:
                epoch = index // self.per_epoch
                batches = self.epoch_batches(epoch)
            yield batches[index % self.per_epoch][self.rank :: self.world]


class RunBatches(RunSampler):
    """Batches of a fixed number of examples, grouped by length."""

    def __init__(self, lengths: Sequence[int], batch_size: int, *, world: int = 1, **place: Any) -> None:
        self.lengths, self.global_batch = lengths, batch_size * world
        super().__init__(max(1, len(lengths) // self.global_batch), world=world, **place)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        return grouped_batches(self.lengths, self.global_batch, seed=self.seed_of(epoch))


class StreamBatches(RunSampler):
    """Batches of consecutive blocks of a stream, by their numbers.

    >>> list(StreamBatches(6, 1, epochs=1.5, first=1, rank=1, world=2))
    [[3], [5], [7]]
    """

    def __init__(self, blocks: int, batch_size: int, *, world: int = 1, **place: Any) -> None:
        self.size = batch_size * world
        super().__init__(max(1, blocks // self.size), world=world, **place)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        first = epoch * self.per_epoch
        return [list(range(i * self.size, (i + 1) * self.size)) for i in range(first, first + self.per_epoch)]


class RunTokenBatches(RunSampler):
    """Batches of about equally many tokens with little padding.

    Pairs are sorted by target and source length, and cut into batches whose longer side, padding included, has at most
    ``batch_tokens`` tokens. Pairs of equal lengths are in a new random order in every epoch, and so are the batches. The
    sorted lengths are the same in every epoch, and with them the cuts: an epoch always has the same number of batches.

    All processes have equally many pairs in every batch, so up to ``world - 1`` pairs of an epoch are left out.

    Args:
        source, target: The lengths of every pair, in tokens.
        batch_tokens: The tokens per batch and process; a pair that is longer is a batch of its own.
    """

    def __init__(
        self, source: Sequence[int], target: Sequence[int], batch_tokens: int, *, world: int = 1, **place: Any
    ) -> None:
        self.source, self.target = np.asarray(source), np.asarray(target)
        longer = np.maximum(self.source, self.target)[np.lexsort((self.source, self.target))]
        self.cuts = token_cuts(longer.tolist(), batch_tokens * world, multiple=world)
        super().__init__(len(self.cuts), world=world, **place)

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        random = np.random.default_rng(self.seed_of(epoch))
        shuffled = random.permutation(len(self.source))
        order = shuffled[np.lexsort((self.source[shuffled], self.target[shuffled]))]
        batches = [order[start:end] for start, end in self.cuts]
        return [random.permutation(batches[index]).tolist() for index in random.permutation(len(batches))]


def token_cuts(lengths: Sequence[int], budget: int, *, multiple: int = 1) -> list[tuple[int, int]]:
    """Return the start and end of runs of lengths that have at most ``budget`` tokens when padded to their longest entry.

    Args:
        budget: The tokens per run; a run has at least ``multiple`` entries all the same.
        multiple: Every run has a multiple of this many entries. Fewer at the end are left out, unless there would be no run.
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


class SplitBatches(Sampler[list[int]]):
    """One pass over a split in order of length, longest first, for one of several processes; every example once.

    Args:
        every: 2 for every second example in this order, and so on.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, *, every: int = 1, rank: int = 0, world: int = 1) -> None:
        order = np.argsort(-np.asarray(lengths), kind="stable")[::every][rank::world].tolist()
        self.batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class RunLoader(DataLoader[Any]):
    """A loader that tells Lightning that it can resume. It has no state: its batch sampler starts at the trainer's own batch
    count (see :meth:`TaskData.train_dataloader`)."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


SPLITS = ("train", "select", "test")


def with_more_tests(found: Iterable[str]) -> list[str]:
    """Return the names of the three splits and of the further test splits that are found, in their order."""
    return [*SPLITS, *(name for name in found if name.startswith(MORE))]


def set_aside_rows(rows: int, share: float, what: str, source: str = "file") -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the rows for training and, a share rounded up, for selection, both in random order.

    Args:
        what: The name of the rows in an error, such as ``examples``.
        source: The kind of source in an error, ``file`` or ``folder``.
    """
    order = np.random.default_rng(0).permutation(rows)
    count = int(np.ceil(share * rows))
    if count >= rows:
        raise GateError(
            f"select_fraction is {share}, which leaves nothing of {rows} {what} to train on; give a smaller share, or a "
            f"--data.select_{source}"
        )
    return order[count:], order[:count]


def distinct_aside(values: Iterable[str], fraction: float, most: int | None = None) -> set[str]:
    """Return a random share of the distinct values: at least one, at most ``most``, and never all of them."""
    distinct = list(dict.fromkeys(values))
    count = min(len(distinct) - 1, most or len(distinct), max(1, round(fraction * len(distinct))))
    order = np.random.default_rng(0).permutation(len(distinct))
    return {distinct[index] for index in order[:count]}


def padded(rows: Iterable[Sequence[int]], value: int) -> Tensor:
    """Return rows of numbers as one tensor, padded on the right to the longest."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


class TaskData(pl.LightningDataModule, ABC):
    """Examples of one task.

    The split ``train`` is for weights and scores, ``select`` for every choice, ``test`` for the results. Each has a column
    ``length``, in tokens, by which batches are grouped.

    Attributes:
        unit: The name of the examples in :meth:`describe`.
        labels: The names of the classes, in their order; empty for tasks without classes.
        notices: Sentences for the user once the data are built, such as how many examples were left out.
        set_aside: Whether the selection split was set aside from the training data.
    """

    unit = "examples"

    def __init__(self, options: DataOptions) -> None:
        super().__init__()
        self.options = options
        self.seed = options.seed
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.splits: dict[str, Dataset] = {}
        self.labels: list[str] = []
        self.notices: list[str] = []
        self.set_aside = False

    def order_by(self, seed: int) -> None:
        """Add a run's seed to that of the data. It orders training batches and chooses the examples on which heads are scored.

        Call this once, before the first loader is made.
        """
        self.seed += seed

    @property
    def processor(self) -> Any:
        """The object that makes a model's inputs, once the data are built: the tokenizer, where there are texts."""
        return self.tokenizer

    @property
    def score_batch_size(self) -> int:
        """The number of examples per batch when heads are scored, by default that of training."""
        return int(self.options.batch_size)  # type: ignore[attr-defined]

    def check_backbone(self, config: Any, name: str) -> None:
        """Raise :class:`GateError` if a model of this config, called ``name``, cannot be of the task; by default any can."""

    @abstractmethod
    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        """Read, check and tokenize everything; do nothing the second time.

        Args:
            stated_labels: The class names of a fine-tuned backbone, whose order is then kept.
        """

    def use_files_of(self, run: Path) -> None:
        """Take the files that an earlier run made for its data from its directory, before :meth:`build`; by default none."""

    def write_files(self, run: Path) -> None:
        """Keep the files that were made for the data in the run's directory; by default none."""

    @property
    @abstractmethod
    def task(self) -> Task:
        """The task of these data, once they are built."""

    def describe(self) -> str:
        """Return one line about the built data: the sizes of the splits, the classes, and :meth:`details`."""
        aside = {"select": " (set aside from training)"} if self.set_aside else {}
        sizes = ", ".join(f"{len(self.splits[name]):,} {name}{aside.get(name, '')}" for name in with_more_tests(self.splits))
        parts = [f"data: {sizes} {self.unit}"]
        if self.labels:
            more = f", and {len(self.labels) - 5} more" if len(self.labels) > 5 else ""
            parts.append(f"{len(self.labels)} classes ({', '.join(self.labels[:5])}{more})")
        return "; ".join([*parts, *self.details()])

    def details(self) -> list[str]:
        """Return more facts for :meth:`describe`, such as the columns that were read; by default none."""
        return []

    @abstractmethod
    def collate(self, split: str) -> Any:
        """Return the function that makes a batch of rows of a split. Worker processes must be able to pickle it."""

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> RunSampler:
        """Return the training batches of one process from ``first`` on, by default of ``batch_size`` examples of similar
        length. They must be a function of (seed, position) alone."""
        lengths, size = self.splits["train"]["length"][:], self.options.batch_size  # type: ignore[attr-defined]
        return RunBatches(lengths, size, epochs=epochs, seed=self.seed, first=first, rank=rank, world=world)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the whole run: every batch of every epoch, from where a resumed run stands."""
        first = 0
        if self.trainer is not None:
            first = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed  # type: ignore[attr-defined]
        return self._loader("train", self.run_batches(first), self.training_rows)

    @property
    def training_rows(self) -> Any:
        """The rows of training batches, by number: those of the training split."""
        return self.splits["train"]

    def run_batches(self, first: int = 0) -> RunSampler:
        """Return the batches of this process over the whole run; the trainer's module says how many epochs that is."""
        epochs = 1.0 if self.trainer is None else getattr(self.trainer.lightning_module, "epochs", 1.0)
        rank, world = self._place()
        return self.batches_of_run(epochs=epochs, first=first, rank=rank, world=world)

    def validation_interval(self, epochs: float) -> float:
        """Return the share of a run between validations: by default one epoch."""
        return min(1.0, 1.0 / epochs)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._split_loader("select", self.options.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return self._split_loader("test", self.options.eval_batch_size)

    @property
    def more_tests(self) -> list[str]:
        """The names of further splits for results, such as ``test_mismatched``."""
        return sorted(name for name in self.splits if name.startswith(MORE))

    def more_test_dataloader(self, split: str) -> DataLoader[Any]:
        """Return the loader of one of :attr:`more_tests`."""
        return self._split_loader(split, self.options.eval_batch_size)

    def score_dataloader(self, rows: int | None = None) -> DataLoader[Any]:
        """Return the training examples on which heads are scored: a random choice of ``score_rows``.

        Args:
            rows: The largest number of them to return, spread evenly over all lengths. Default: all.
        """
        if "score" not in self.splits:
            chosen = np.random.default_rng(self.seed).permutation(self.splits["train"].num_rows)[: self.options.score_rows]
            self.splits["score"] = self.splits["train"].select(np.sort(chosen))
        every = 1 if rows is None else -(-self.splits["score"].num_rows // rows)
        return self._split_loader("score", self.score_batch_size, every=every)

    def score_places(self) -> range:
        """Return the numbers of this process's examples of :meth:`score_dataloader` among those of all processes."""
        rank, world = self._place()
        return range(rank, min(self.options.score_rows, self.splits["train"].num_rows), world)

    def calibration_dataloaders(self, rows: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
        """Return two disjoint halves of ``rows`` training examples chosen at random.

        As far as there are enough, they are other examples than those of :meth:`score_dataloader`.
        """
        order = np.random.default_rng(self.seed).permutation(self.splits["train"].num_rows)
        chosen = np.roll(order, -self.options.score_rows)[:rows]
        loaders = []
        for name, half in (("propose", chosen[::2]), ("decide", chosen[1::2])):
            self.splits[name] = self.splits["train"].select(np.sort(half))
            loaders.append(self._split_loader(name, self.score_batch_size))
        return loaders[0], loaders[1]

    @property
    def order(self) -> str:
        """Everything besides the data that decides on the order of training batches."""
        return f"{self.score_batch_size} {self.options.score_rows} {self.seed}"

    def fingerprint(self) -> str:
        """Return a hash of the encoded splits and of the order of training batches."""
        digest = xxhash.xxh3_128(self.order.encode())
        for name in (*SPLITS, *self.more_tests):
            for column in self.splits[name].column_names:
                digest.update(f"{name} ".encode())
                add_column(digest, self.splits[name], column)
        return digest.hexdigest()

    def _place(self) -> tuple[int, int]:
        if self.trainer is None:  # heads may be scored before any trainer has had the data
            return processes.rank(), processes.world_size()
        return self.trainer.global_rank, self.trainer.world_size

    def _split_loader(self, split: str, batch_size: int, *, every: int = 1) -> DataLoader[Any]:
        rank, world = self._place()
        lengths = self.splits[split]["length"][:]
        return self._loader(split, SplitBatches(lengths, batch_size, every=every, rank=rank, world=world))

    def _loader(self, split: str, batches: Any, rows: Any = None) -> DataLoader[Any]:
        return RunLoader(
            self.splits[split] if rows is None else rows,
            batch_sampler=batches,
            collate_fn=self.collate(split),
            num_workers=self.options.num_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            persistent_workers=False,
        )


class WithOwnTokenizer(TaskData):
    """Data whose tokenizer is named, the backbone's, or trained on the training texts and kept with the run."""

    def __init__(self, options: DataOptions) -> None:
        super().__init__(options)
        self.tokenizer_name: str | None = options.tokenizer  # type: ignore[attr-defined]

    def use_files_of(self, run: Path) -> None:
        """Take over the tokenizer that an earlier run trained: its weights mean nothing with another."""
        if self.tokenizer_name is None and (run / "tokenizer").is_dir():
            self.tokenizer_name = str(run / "tokenizer")

    def write_files(self, run: Path) -> None:
        assert self.tokenizer is not None
        self.tokenizer.save_pretrained(run / "tokenizer")

    def named_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer that is named or the backbone's; None if one is to be trained."""
        name = self.tokenizer_name or backbone
        return None if name is None else read_tokenizer(name)
