"""The order of training batches, as a pure function of a seed: resumable, shardable, grouped by length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

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
