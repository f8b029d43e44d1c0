"""Training batches of about equally many tokens, as a pure function of a seed: resumable, shardable, with little padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from training.data.batches import RunSampler


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
