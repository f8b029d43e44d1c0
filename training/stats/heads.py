"""What is said of scores over the heads of one model: 95 % intervals by the bootstrap over heads. Pure functions on arrays.

Heads are resampled and the seeds of a head stay together, so that an interval is about other heads of such a model. Heads are
taken to be independent of each other, which those of one layer are not altogether.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

from training.stats.bootstrap import LEVEL, Array

RESAMPLES = 2_000
LEAST_HEADS = 5
"""In a group; of fewer the bootstrap knows too little, and there is no interval."""


class Estimate(NamedTuple):
    """A number with its 95 % interval over heads; NaN where there is none."""

    value: float
    low: float
    high: float

    @property
    def sure(self) -> str:
        """The interval in words, such as `` (95 % interval 0.10 to 0.30)``; empty without one."""
        return f" (95 % interval {self.low:.2f} to {self.high:.2f})" if np.isfinite(self.low) else ""


def estimate(values: Array, heads: int) -> Estimate:
    """The percentile interval of resampled values.

    Args:
        values: the first is that of the heads themselves, ``[1 + resamples]``.
        heads: of the smallest group that they are about.
    """
    known = values[1:][np.isfinite(values[1:])]
    if not np.isfinite(values[0]) or heads < LEAST_HEADS:
        return Estimate(float(values[0]), np.nan, np.nan)
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(values[0]), float(low), float(high))


def head_draws(heads: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Indices of heads, ``[1 + resamples, heads]``; the first row has every head once."""
    drawn = np.random.default_rng(seed).integers(heads, size=(RESAMPLES, heads))
    return np.concatenate([np.arange(heads)[None], drawn])


@lru_cache(maxsize=8)
def _times_drawn(heads: int) -> Array:
    """How often each head is in each resample, ``[1 + resamples, heads]``; not to be written to."""
    return np.stack([np.bincount(draw, minlength=heads) for draw in head_draws(heads)]).astype(float)


def spearman(first: ArrayLike, second: ArrayLike) -> Array:
    """Spearman's rank correlation over heads, the mean over seeds: of all heads, and of each resample, ``[1 + resamples]``; NaN
    where one of the two is constant.

    Args:
        first, second: ``[seeds, heads]``.
    """
    one, other = np.atleast_2d(np.asarray(first, dtype=float)), np.atleast_2d(np.asarray(second, dtype=float))
    draws = head_draws(one.shape[1])
    found = []
    for x, y in zip(one, other, strict=True):
        ranks = [rankdata(values[draws], axis=-1) for values in (x, y)]
        a, b = (values - values.mean(axis=-1, keepdims=True) for values in ranks)
        spread = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
        found.append(np.divide((a * b).sum(-1), spread, out=np.full(len(draws), np.nan), where=spread > 0))
    return np.mean(found, axis=0)


def superiority(values: ArrayLike, members: ArrayLike) -> Array:
    """How often a head of a group has a larger value than one outside it, ties counting half, the mean over seeds: of all
    heads, and of each resample, ``[1 + resamples]``. One half is chance. It is Mann and Whitney's (1947) statistic as a share,
    the area under the ROC curve.

    Args:
        values: ``[seeds, heads]``; infinite ones are larger than all others and equal to each other.
        members: whether a head is of the group, ``[seeds, heads]``, or ``[heads]`` for all seeds.
    """
    table = np.atleast_2d(np.asarray(values, dtype=float))
    groups = np.broadcast_to(np.asarray(members, dtype=bool), table.shape)
    times = _times_drawn(table.shape[1])
    found = []
    for own, group in zip(table, groups, strict=True):
        larger = (own[:, None] > own[None]) + 0.5 * (own[:, None] == own[None])
        inside, outside = times[:, group], times[:, ~group]
        pairs = inside.sum(-1) * outside.sum(-1)
        ahead = ((inside @ larger[np.ix_(group, ~group)]) * outside).sum(-1)
        found.append(np.divide(ahead, pairs, out=np.full(len(times), np.nan), where=pairs > 0))
    return np.mean(found, axis=0)


def shares(values: ArrayLike, members: ArrayLike) -> Array:
    """The mean over the heads of a group with its 95 % interval, at each of several points, ``[3, points]``: mean, low, high.

    Args:
        values: ``[heads, points]``.
        members: whether a head is of the group, ``[heads]``; at least one is.
    """
    table, group = np.asarray(values, dtype=float), np.asarray(members, dtype=bool)
    own = table[group]
    found = own[head_draws(len(own))].mean(axis=1)
    low, high = np.quantile(found[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    if len(own) < LEAST_HEADS:
        low = high = np.full_like(low, np.nan)
    return np.stack([found[0], low, high])
