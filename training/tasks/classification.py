"""Sentence classification: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from transformers import PreTrainedModel

from training.tasks.base import Batch
from training.tasks.loading import read_config
from training.tasks.sentences import SentenceTask, label_names

Array = NDArray[np.float64]


def class_counts(predictions: NDArray[Any], targets: NDArray[Any], classes: int | None = None) -> NDArray[np.bool_]:
    """Return for each class whether it is predicted, is true, and both: ``[..., examples, 3 * classes]``.

    Args:
        predictions: The class numbers ``[..., examples]``.
        targets: The true ones, broadcastable to them.
        classes: The number of classes; by default one more than the largest number that occurs.
    """
    names = np.arange(max(predictions.max(), targets.max()) + 1 if classes is None else classes)
    predicted, true = predictions[..., None] == names, np.broadcast_to(targets, predictions.shape)[..., None] == names
    return np.concatenate([predicted, true, predicted & true], axis=-1)


def accuracy(means: Array) -> Array:
    """Return the share of right answers from means of :func:`class_counts` ``[..., 3 * classes]``."""
    result: Array = np.split(means, 3, axis=-1)[2].sum(-1)
    return result


def macro_f1(means: Array) -> Array:
    """Return the mean F1 of the classes that occur, as target or as prediction."""
    predicted, true, both = np.split(means, 3, axis=-1)
    present = predicted + true > 0
    f1 = np.divide(2 * both, predicted + true, out=np.zeros_like(both), where=present)
    result: Array = f1.sum(-1) / present.sum(-1)
    return result


def binary_f1(means: Array) -> Array:
    """Return F1 of class 1, the second of two; 0 where it neither occurs nor is predicted."""
    parts = np.split(means, 3, axis=-1)
    if parts[0].shape[-1] == 1:  # the second class does not occur
        return np.zeros(means.shape[:-1])
    predicted, true, both = (part[..., 1] for part in parts)
    return np.divide(2 * both, predicted + true, out=np.zeros_like(both), where=predicted + true > 0)


def matthews(means: Array) -> Array:
    """Return Gorodkin's (2004) correlation for any number of classes; 0 where targets or predictions are of one class."""
    predicted, true, both = np.split(means, 3, axis=-1)
    covariance = both.sum(-1) - (predicted * true).sum(-1)
    variance = (1 - np.square(predicted).sum(-1)) * (1 - np.square(true).sum(-1))
    return np.divide(covariance, np.sqrt(variance), where=variance > 0, out=np.zeros_like(variance))


class ClassMetric(Metric):
    """A metric of classes over a split, in any batching and under DDP, as statistics compute it.

    Args:
        value: The function from means of :func:`class_counts` to the metric, such as :func:`matthews`.
        classes: The number of classes.

    >>> metric = ClassMetric(matthews, classes=2)
    >>> metric.update(torch.eye(2)[[1, 1, 1, 1]], torch.tensor([0, 1, 1, 1]))
    >>> float(metric.compute())
    0.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    counts: Tensor
    examples: Tensor

    def __init__(self, value: Callable[[Array], Array], classes: int) -> None:
        super().__init__()
        self.value = value
        self.classes = classes
        self.add_state("counts", torch.zeros(3 * classes, dtype=torch.long), dist_reduce_fx="sum")
        self.add_state("examples", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add examples.

        Args:
            logits: The scores ``[batch, classes]``.
            labels: The true classes ``[batch]``.
        """
        counts = class_counts(logits.argmax(-1).cpu().numpy(), labels.cpu().numpy(), self.classes).sum(axis=0)
        self.counts += torch.from_numpy(counts).to(self.counts.device)
        self.examples += len(labels)

    def compute(self) -> Tensor:
        return torch.tensor(float(self.value(self.counts.cpu().numpy() / self.examples.cpu().numpy())), dtype=torch.float64)


@dataclass
class Classification(SentenceTask):
    """Sentence classification with an ``AutoModelForSequenceClassification``.

    Args:
        labels: class names; a class's position is its number. With ``binary_f1`` the second one is the positive one.
        main_metric: ``accuracy``, ``f1``, ``binary_f1`` or ``matthews``.
    """

    what: ClassVar[str] = "a classifier"

    labels: list[str]
    main_metric: str = "accuracy"

    @property
    def label_fields(self) -> dict[str, Any]:
        return label_names(self.labels) | {"problem_type": "single_label_classification"}

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every example ``[batch]``, float32, and the logits ``[batch, classes]``."""
        logits = model(**self.model_inputs(model, batch)).logits.float()
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none"), logits

    def metrics(self, split: str) -> MetricCollection:
        """Accuracy, macro F1 and Matthews correlation, and binary F1 where it is asked for, the same for every split."""
        functions = {"accuracy": accuracy, "f1": macro_f1, "matthews": matthews}
        if self.main_metric == "binary_f1":
            functions["binary_f1"] = binary_f1
        return MetricCollection({name: ClassMetric(value, len(self.labels)) for name, value in functions.items()})

    def metric_types(self) -> dict[str, dict[str, Any]]:
        return {
            "accuracy": {"type": "accuracy"},
            "f1": {"type": "f1", "args": {"average": "macro"}},
            "matthews": {"type": "matthews_correlation"},
            "binary_f1": {"type": "f1"},
        }

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits, batch["labels"])


def stated_labels(backbone: str | None, *, trust_remote_code: bool = False) -> list[str] | None:
    """The class names that a fine-tuned checkpoint states, in its order; None for placeholders like LABEL_0."""
    if backbone is None:
        return None
    config = read_config(backbone, trust_remote_code=trust_remote_code)
    names = [str(name) for _, name in sorted(config.id2label.items())]
    return None if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names
