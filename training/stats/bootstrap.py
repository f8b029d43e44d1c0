"""The paired bootstrap over test examples, for any metric. Pure functions on arrays.

Predictions, class numbers or texts, are ``[systems, examples]`` in one fixed order of examples, so every difference is paired.
Tests over several seeds are in :mod:`training.stats.significance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gates.errors import GateError
from training.tasks.classification import binary_f1, class_counts, macro_f1, matthews, pearson_of_means, products, spearman
from training.tasks.token_classification import entity_counts, entity_f1, scheme_of
from training.tasks.translation import BleuTokenizer, bleu_counts, bleu_of_counts

LEVEL = 0.95
RESAMPLES = 10_000
"""Enough for p values below 0.05 after Holm's correction over all pairs of a dozen methods."""

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


# Metrics that are functions of means over examples.
@dataclass(frozen=True)
class MeanMetric:
    """A metric that is a function of means over examples, so that a resample of examples is one matrix product.

    Args:
        statistics: A function of predictions ``[..., examples]`` and targets (broadcastable) that returns the terms of the
            means, ``[..., examples, k]``.
        value: A function of the means ``[..., k]`` that returns the metric ``[...]``.
    """

    statistics: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]
    value: Callable[[Array], Array]


def _correct(predictions: Integers, targets: Integers) -> NDArray[Any]:
    return (predictions == targets)[..., None]


def _text_counts(predictions: NDArray[Any], targets: NDArray[Any], tokenize: BleuTokenizer = "13a") -> NDArray[Any]:
    """Return the counts of BLEU for each text, and last the number of all texts: ``[..., examples, 11]``."""
    references = np.broadcast_to(targets, predictions.shape)
    counts = bleu_counts(predictions.ravel().tolist(), references.ravel().tolist(), tokenize=tokenize)
    texts = np.full((len(counts), 1), predictions.shape[-1])
    return np.concatenate([counts, texts], axis=1).reshape(*predictions.shape, -1)


def _bleu(means: Array) -> Array:
    return bleu_of_counts(np.rint(means[..., :-1] * means[..., -1:]))  # smoothing needs sums


def _surprise_and_tokens(predictions: NDArray[Any], targets: NDArray[Any]) -> NDArray[Any]:
    return np.stack(np.broadcast_arrays(predictions, targets), axis=-1)


def _perplexity(means: Array) -> Array:
    result: Array = np.exp(means[..., 0] / means[..., 1])
    return result


def _of_words(predictions: NDArray[Any], targets: NDArray[Any]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the predicted and the true tags of every sentence of every row."""
    true = np.broadcast_to(targets, predictions.shape)
    return ((own.split(), gold.split()) for own, gold in zip(predictions.ravel().tolist(), true.ravel().tolist(), strict=True))


def _word_counts(predictions: NDArray[Any], targets: NDArray[Any]) -> NDArray[Any]:
    """Return the words of each sentence with the right tag, and all its words: ``[..., examples, 2]``."""
    counts = [(sum(map(eq, own, gold)), len(gold)) for own, gold in _of_words(predictions, targets)]
    return np.array(counts).reshape(*predictions.shape, 2)


def _entity_counts(predictions: NDArray[Any], targets: NDArray[Any]) -> NDArray[Any]:
    """Return the right, predicted and true entities of each sentence: ``[..., examples, 3]``."""
    own, gold = zip(*_of_words(predictions, targets), strict=True)
    scheme = scheme_of({tag for tags in (*own, *gold) for tag in tags}) or "BIO"  # only the tag O: there are no entities
    return entity_counts(own, gold, scheme).reshape(*predictions.shape, 3)


def bleu_metric(tokenize: BleuTokenizer) -> MeanMetric:
    """Return corpus BLEU with one of sacrebleu's tokenizers."""
    return MeanMetric(partial(_text_counts, tokenize=tokenize), _bleu)


METRICS: dict[str, MeanMetric | Callable[[NDArray[Any], NDArray[Any]], Array]] = {
    "accuracy": MeanMetric(_correct, lambda means: means[..., 0]),
    "f1": MeanMetric(class_counts, macro_f1),
    "binary_f1": MeanMetric(class_counts, binary_f1),
    "matthews": MeanMetric(class_counts, matthews),
    "pearson": MeanMetric(products, pearson_of_means),
    "spearman": spearman,
    "bleu": bleu_metric("13a"),
    "perplexity": MeanMetric(_surprise_and_tokens, _perplexity),
    "token_accuracy": MeanMetric(_word_counts, lambda means: means[..., 0] / means[..., 1]),
    "entity_f1": MeanMetric(_entity_counts, entity_f1),
}
"""The metrics of classes, numbers, texts, negative log likelihoods with numbers of tokens, and tags of words between spaces."""
OF_CLASSES = ("accuracy", "f1", "binary_f1", "matthews")
Metric = str | MeanMetric | Callable[[Integers, Integers], ArrayLike]


def metric_values(predictions: ArrayLike, targets: ArrayLike, metric: Metric = "accuracy") -> Array:
    """Return the metric of every row of predictions ``[..., examples]``.

    Args:
        metric: A name in :data:`METRICS`, a :class:`MeanMetric`, or any function of both that works along the last axis.
    """
    rows, true = _aligned(predictions, targets)
    chosen = find_metric(metric)
    if isinstance(chosen, MeanMetric):
        return chosen.value(chosen.statistics(rows, true).mean(axis=-2, dtype=np.float64))
    return np.asarray(chosen(rows, true), dtype=float)


def majority_class(targets: ArrayLike) -> dict[str, float]:
    """Return the score of always answering the most frequent class, by metric."""
    true = np.asarray(targets)
    classes, counts = np.unique(true, return_counts=True)
    answer = np.full_like(true, classes[counts.argmax()])
    names = [name for name in OF_CLASSES if name != "binary_f1" or len(classes) == 2]
    return {name: float(metric_values(answer, true, name)) for name in names}


def majority_tag(targets: ArrayLike) -> dict[str, float]:
    """Return the score of always answering the most frequent tag; the targets are the tags of sentences between spaces."""
    _, counts = np.unique([tag for tags in np.asarray(targets).tolist() for tag in tags.split()], return_counts=True)
    return {"token_accuracy": float(counts.max() / counts.sum())}


def find_metric(metric: Metric) -> MeanMetric | Callable[[Integers, Integers], ArrayLike]:
    """Return a metric by its name, and any other metric unchanged."""
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


# The paired bootstrap.


class Difference(NamedTuple):
    """A metric of a minus that of b, its interval, and a two-sided p value; NaN without a test."""

    difference: float
    low: float
    high: float
    p: float


def resample_metric(
    predictions: ArrayLike, targets: ArrayLike, metric: Metric = "accuracy", *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[Array, Array]:
    """Return the metric of systems, ``[systems]``, and on the same resamples of examples, ``[resamples, systems]``.

    Args:
        predictions: The predictions ``[systems, examples]``.
        targets: The targets ``[examples]`` or ``[systems, examples]``.
        metric: The metric, see :func:`metric_values`. Functions are called once per resample; the others are fast.
    """
    rows, true = _aligned(predictions, targets)
    systems, examples = rows.shape
    chosen, random = find_metric(metric), np.random.default_rng(seed)
    replicates = np.empty((resamples, systems))
    statistics = None
    if isinstance(chosen, MeanMetric):
        statistics = chosen.statistics(rows, true)
        exact = np.float64 if np.issubdtype(statistics.dtype, np.floating) else np.float32  # float32 holds counts exactly
        statistics = statistics.astype(exact)
        parts = statistics.shape[-1]
        statistics = np.ascontiguousarray(statistics.transpose(1, 0, 2).reshape(examples, systems * parts))
    for start in range(0, resamples, 500):  # 500 resamples of 10,000 examples take 20 MB
        size = min(500, resamples - start)
        drawn = random.integers(examples, size=(size, examples))
        if statistics is not None:
            assert isinstance(chosen, MeanMetric)
            places = drawn + examples * np.arange(size)[:, None]
            counts = np.bincount(places.ravel(), minlength=size * examples).reshape(size, examples).astype(exact)
            means = (counts @ statistics).astype(np.float64).reshape(size, systems, parts) / examples
            replicates[start : start + size] = chosen.value(means)
        else:
            for row, indices in enumerate(drawn):
                replicates[start + row] = metric_values(rows[:, indices], true[..., indices], chosen)
    return metric_values(rows, true, chosen), replicates


def resampled_difference(difference: float, replicates: ArrayLike, *, level: float = LEVEL) -> Difference:
    """Test the difference of two systems against the chance of examples (Efron and Tibshirani 1993; Koehn 2004).

    The test is about these two trained systems, not about other seeds. p is at least ``2 / (resamples + 1)``, and below
    ``1 - level`` if the interval excludes 0.

    Args:
        replicates: The differences on resamples of examples ``[resamples]``.
    """
    drawn = np.array(replicates, dtype=float)
    drawn[np.abs(drawn) < 1e-12] = 0.0  # ties, but for rounding
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    tail = min((drawn <= 0).sum(), (drawn >= 0).sum()) + 1
    return Difference(difference, float(low), float(high), float(min(1.0, 2 * tail / (len(drawn) + 1))))
