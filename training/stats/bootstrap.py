"""The paired bootstrap of two systems over examples and seeds, for any metric. Pure functions on arrays.

Predictions, class numbers or texts, are ``[seeds, examples]`` in one fixed order of examples, so that every difference is a
paired one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gates.errors import GateError
from training.tasks.translation_metrics import BleuTokenizer, bleu_counts, bleu_of_counts

LEVEL = 0.95
RESAMPLES = 10_000
"""So many that Holm's correction over all pairs of a dozen methods can still come below 0.05."""
CHUNK = 500
"""Resamples drawn at a time: 10,000 examples take 20 MB."""

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


# -- metrics that are functions of means over examples ------------------------------------------------------------


@dataclass(frozen=True)
class MeanMetric:
    """A metric that depends on means over examples alone, so that a resample of examples is one matrix product.

    Args:
        statistics: from predictions ``[..., examples]`` and targets (broadcastable) to what is averaged,
            ``[..., examples, k]``.
        value: from the means ``[..., k]`` to the metric ``[...]``.
    """

    statistics: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
    value: Callable[[Array], Array]


def _correct(predictions: Integers, targets: Integers) -> NDArray[Any]:
    return (predictions == targets)[..., None]


def _class_counts(predictions: Integers, targets: Integers) -> NDArray[Any]:
    """For each class whether it was predicted, is true, and both: ``[..., examples, 3 * classes]``."""
    names = np.arange(max(predictions.max(), targets.max()) + 1)
    predicted, true = predictions[..., None] == names, np.broadcast_to(targets, predictions.shape)[..., None] == names
    return np.concatenate([predicted, true, predicted & true], axis=-1)


def _macro_f1(means: Array) -> Array:
    """The mean over the classes that occur, as target or as prediction (as torchmetrics has it)."""
    predicted, true, both = np.split(means, 3, axis=-1)
    present = predicted + true > 0
    f1 = np.divide(2 * both, predicted + true, out=np.zeros_like(both), where=present)
    result: Array = f1.sum(-1) / present.sum(-1)
    return result


def _matthews(means: Array) -> Array:
    """Gorodkin's (2004) correlation for any number of classes; 0 where targets or predictions are of one class."""
    predicted, true, both = np.split(means, 3, axis=-1)
    covariance = both.sum(-1) - (predicted * true).sum(-1)
    variance = (1 - np.square(predicted).sum(-1)) * (1 - np.square(true).sum(-1))
    varies = variance > 1e-12
    return np.divide(
        covariance, np.sqrt(variance, where=varies, out=np.ones_like(variance)), where=varies, out=np.zeros_like(variance)
    )


def _text_counts(predictions: NDArray[Any], targets: NDArray[Any], tokenize: BleuTokenizer = "13a") -> NDArray[Any]:
    """What BLEU counts in each text, and at last the number of texts, the same for all: ``[..., examples, 11]``."""
    references = np.broadcast_to(targets, predictions.shape)
    counts = bleu_counts(predictions.ravel().tolist(), references.ravel().tolist(), tokenize=tokenize)
    texts = np.full((len(counts), 1), predictions.shape[-1])
    return np.concatenate([counts, texts], axis=1).reshape(*predictions.shape, -1)


def _bleu(means: Array) -> Array:
    """From means back to sums, which smoothing needs."""
    return bleu_of_counts(np.rint(means[..., :-1] * means[..., -1:]))


def bleu_metric(tokenize: BleuTokenizer) -> MeanMetric:
    """Corpus BLEU with one of sacrebleu's tokenizers."""
    return MeanMetric(partial(_text_counts, tokenize=tokenize), _bleu)


METRICS: dict[str, MeanMetric] = {
    "accuracy": MeanMetric(_correct, lambda means: means[..., 0]),
    "f1": MeanMetric(_class_counts, _macro_f1),
    "matthews": MeanMetric(_class_counts, _matthews),
    "bleu": bleu_metric("13a"),
}
OF_CLASSES = ("accuracy", "f1", "matthews")
Metric = str | MeanMetric | Callable[[Integers, Integers], ArrayLike]


def metric_values(predictions: ArrayLike, targets: ArrayLike, metric: Metric = "accuracy") -> Array:
    """The metric of every row of predictions.

    Args:
        predictions: ``[..., examples]``.
        targets: ``[examples]`` or as predictions.
        metric: a name in :data:`METRICS`, a :class:`MeanMetric`, or any function of both that works along the last axis.

    Returns:
        ``[...]``.
    """
    rows, true = _aligned(predictions, targets)
    chosen = find_metric(metric)
    if isinstance(chosen, MeanMetric):
        return chosen.value(chosen.statistics(rows, true).mean(axis=-2, dtype=np.float64))
    return np.asarray(chosen(rows, true), dtype=float)


def majority_class(targets: ArrayLike) -> dict[str, float]:
    """What always answering the most frequent class would score, by metric.

    Args:
        targets: class numbers ``[examples]``.
    """
    true = np.asarray(targets)
    classes, counts = np.unique(true, return_counts=True)
    answer = np.full_like(true, classes[counts.argmax()])
    return {name: float(metric_values(answer, true, name)) for name in OF_CLASSES}


def find_metric(metric: Metric) -> MeanMetric | Callable[[Integers, Integers], ArrayLike]:
    """A metric by its name; anything else as it is."""
    if not isinstance(metric, str):
        return metric
    if metric not in METRICS:
        raise GateError(f"unknown metric {metric!r}; expected one of {', '.join(METRICS)}")
    return METRICS[metric]


def _aligned(predictions: ArrayLike, targets: ArrayLike) -> tuple[Integers, Integers]:
    rows, true = np.asarray(predictions), np.asarray(targets)
    if rows.ndim == 0 or rows.shape[-1] == 0 or true.shape not in (rows.shape, rows.shape[-1:]):
        raise GateError(
            f"predictions have shape {list(rows.shape)} and targets {list(true.shape)}; expected [..., examples] and [examples]"
        )
    return rows, true


# -- the paired bootstrap ------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """A metric of a minus that of b, its percentile interval, and a two-sided p value."""

    difference: float
    low: float
    high: float
    p: float


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    targets: ArrayLike,
    metric: Metric = "accuracy",
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> Difference:
    """Whether system a is better than system b beyond the chance of examples and of seeds (Efron and Tibshirani 1993;
    Koehn 2004 for systems on one test set; resampling both ways is the pigeonhole bootstrap of Owen 2007).

    Examples are drawn with replacement, the same for both systems and all seeds; seeds are drawn in pairs. Of n > 1
    seeds n - 1 are drawn, with which the variance of a mean of few is right (Rao and Wu 1988), where n would give
    (n - 1) / n of it. One seed leaves the chance of examples alone.

    Args:
        a, b: predictions ``[examples]`` or ``[seeds, examples]``, the same seeds in the same order.
        targets: ``[examples]``, or one row per seed.
        metric: see :func:`metric_values`; functions are called once per resample, the others are fast.
        resamples: of the bootstrap; the smallest p is ``2 / (resamples + 1)``.
        seed: of the resampling.
        level: of the interval.

    Returns:
        The difference of the means over seeds. The p value is of the difference being on the other side of 0, and below
        ``1 - level`` where the interval does not hold 0.

    Raises:
        GateError: for shapes that do not fit.
    """
    first, second = np.atleast_2d(np.asarray(a)), np.atleast_2d(np.asarray(b))
    if first.shape != second.shape:
        raise GateError(
            f"the predictions have shapes {list(first.shape)} and {list(second.shape)}; expected the same seeds and examples"
        )
    true = np.broadcast_to(np.asarray(targets), first.shape)
    both, targets_of_both = np.concatenate([first, second]), np.concatenate([true, true])
    values, replicates = resample_metric(both, targets_of_both, metric, resamples=resamples, seed=seed)
    seeds = len(first)
    return resampled_difference(
        values[:seeds], values[seeds:], replicates[:, :seeds], replicates[:, seeds:], seed=seed, level=level
    )


def resample_metric(
    predictions: ArrayLike, targets: ArrayLike, metric: Metric = "accuracy", *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Array, Array]:
    """The metric of many systems on the same resamples of examples, for :func:`resampled_difference` of any two.

    Args:
        predictions: ``[systems, examples]``.
        targets: ``[examples]`` or ``[systems, examples]``.
        metric, resamples, seed: see :func:`paired_bootstrap`.

    Returns:
        Values ``[systems]`` and replicates ``[resamples, systems]``.
    """
    rows, true = _aligned(predictions, targets)
    systems, examples = rows.shape
    chosen, random = find_metric(metric), np.random.default_rng(seed)
    replicates = np.empty((resamples, systems))
    statistics = None
    if isinstance(chosen, MeanMetric):
        statistics = chosen.statistics(rows, true).astype(np.float32)  # counts are exact in float32
        parts = statistics.shape[-1]
        statistics = np.ascontiguousarray(statistics.transpose(1, 0, 2).reshape(examples, systems * parts))
    for start in range(0, resamples, CHUNK):
        size = min(CHUNK, resamples - start)
        drawn = random.integers(examples, size=(size, examples))
        if statistics is not None:
            assert isinstance(chosen, MeanMetric)
            places = drawn + examples * np.arange(size)[:, None]
            counts = np.bincount(places.ravel(), minlength=size * examples).reshape(size, examples).astype(np.float32)
            means = (counts @ statistics).astype(np.float64).reshape(size, systems, parts) / examples
            replicates[start : start + size] = chosen.value(means)
        else:
            for row, indices in enumerate(drawn):
                replicates[start + row] = metric_values(rows[:, indices], true[..., indices], chosen)
    return metric_values(rows, true, chosen), replicates


def resampled_difference(
    a: Array, b: Array, replicates_a: Array, replicates_b: Array, *, seed: int = 0, level: float = LEVEL
) -> Difference:
    """Difference of two systems over paired seeds, from their values ``[seeds]`` and replicates ``[resamples, seeds]``."""
    resamples, seeds = replicates_a.shape
    drawn = np.random.default_rng([seed, 1]).integers(seeds, size=(resamples, max(1, seeds - 1)))
    differences = np.take_along_axis(replicates_a - replicates_b, drawn, axis=1).mean(axis=1)
    differences[np.abs(differences) < 1e-12] = 0.0  # what rounding leaves of a tie
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    tail = min((differences <= 0).sum(), (differences >= 0).sum()) + 1
    return Difference(float(np.mean(a - b)), float(low), float(high), float(min(1.0, 2 * tail / (resamples + 1))))
