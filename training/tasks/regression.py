"""A number for each sentence: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat
from transformers import PreTrainedModel

from training.tasks.classification import Array
from training.tasks.base import Batch
from training.tasks.sentences import SentenceTask

ROUNDING = 1e-12
"""The part of a mean square up to which a variance is what rounding leaves of values that are all the same."""


def products(predictions: NDArray[Any], targets: NDArray[Any]) -> Array:
    """Return what a correlation is made of, ``[..., examples, 5]``, whose means over examples :func:`pearson_of_means` takes.

    A correlation depends on neither origin nor unit. Deviations from the median, relative to the largest, lose little, and
    those of equal values are exactly 0.

    Args:
        predictions: The numbers ``[..., examples]``.
        targets: What they should be, broadcastable to them.
    """
    x, y = _deviations(predictions), np.broadcast_to(_deviations(targets), predictions.shape)
    return np.stack([x, y, x * x, y * y, x * y], axis=-1)


def _deviations(values: NDArray[Any]) -> Array:
    exact = values.astype(np.float64)
    found: Array = exact - np.median(exact, axis=-1, keepdims=True)
    largest = np.abs(found).max(axis=-1, keepdims=True)
    return np.divide(found, largest, out=found, where=largest > 0)


def pearson_of_means(means: Array) -> Array:
    """Return Pearson's correlation from means of :func:`products` ``[..., 5]``; 0 where predictions or targets do not vary."""
    x, y, xx, yy, xy = np.moveaxis(means, -1, 0)
    variance_x, variance_y = xx - x * x, yy - y * y
    varies = (variance_x > ROUNDING * xx) & (variance_y > ROUNDING * yy)
    scale = np.sqrt(variance_x * variance_y, where=varies, out=np.ones_like(xx))
    return np.divide(xy - x * y, scale, where=varies, out=np.zeros_like(xx)).clip(-1, 1)


def pearson(predictions: NDArray[Any], targets: NDArray[Any]) -> Array:
    """Return Pearson's correlation ``[...]`` of numbers ``[..., examples]``; 0 where one of them does not vary."""
    return pearson_of_means(products(predictions, targets).mean(axis=-2))


def spearman(predictions: NDArray[Any], targets: NDArray[Any]) -> Array:
    """Return Pearson's correlation of ranks, equal values having their mean rank."""
    return pearson(rankdata(predictions, axis=-1), rankdata(targets, axis=-1))


class Correlation(Metric):
    """A correlation over a split, in any batching and under DDP, as statistics compute it.

    Args:
        value: The function of predictions and targets, :func:`pearson` or :func:`spearman`.

    >>> metric = Correlation(spearman)
    >>> metric.update(torch.tensor([0.1, 0.2, 7.0]), torch.tensor([1.0, 2.0, 3.0]))
    >>> float(metric.compute())
    1.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    predictions: list[Tensor]
    targets: list[Tensor]

    def __init__(self, value: Callable[[NDArray[Any], NDArray[Any]], Array]) -> None:
        super().__init__()
        self.value = value
        for name in ("predictions", "targets"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add examples: what is predicted and what should be, ``[batch]`` each."""
        self.predictions.append(predictions)
        self.targets.append(targets)

    def compute(self) -> Tensor:
        rows = (dim_zero_cat(part).cpu().numpy() for part in (self.predictions, self.targets))
        return torch.tensor(float(self.value(*rows)), dtype=torch.float64)


@dataclass
class Regression(SentenceTask):
    """A number for each sentence, by an ``AutoModelForSequenceClassification`` with one output.

    Args:
        main_metric: ``pearson`` or ``spearman``.
    """

    what: ClassVar[str] = "a model of sentences"

    main_metric: str = "pearson"

    @property
    def label_fields(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The squared error of every example ``[batch]``, float32, and what is predicted ``[batch, 1]``."""
        logits = model(**self.model_inputs(model, batch)).logits.float()
        return torch.square(logits[:, 0] - batch["labels"]), logits

    def metrics(self, split: str) -> MetricCollection:
        """Pearson's correlation and Spearman's, of ranks, the same for every split. A model that says the same of every
        sentence, as one may without its heads, tells nothing apart: both are 0 then, where they would be undefined."""
        return MetricCollection({"pearson": Correlation(pearson), "spearman": Correlation(spearman)}, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        return {"pearson": {"type": "pearsonr"}, "spearman": {"type": "spearmanr"}}

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits[:, 0], batch["labels"])

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Numbers, of the model and as they should be."""
        return logits[:, 0], batch["labels"]
