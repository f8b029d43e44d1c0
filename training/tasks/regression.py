"""A number for each sentence: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import MetricCollection, PearsonCorrCoef, SpearmanCorrCoef
from transformers import PreTrainedModel

from training.tasks.base import Batch
from training.tasks.sentences import SentenceTask


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
        return MetricCollection({"pearson": Pearson(), "spearman": Spearman()}, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        return {"pearson": {"type": "pearsonr"}, "spearman": {"type": "spearmanr"}}

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits[:, 0], batch["labels"])

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Numbers, of the model and as they should be."""
        return logits[:, 0], batch["labels"]


class Pearson(PearsonCorrCoef):
    """Pearson's correlation, 0 where the predictions are all the same."""

    def compute(self) -> Tensor:
        return _defined(super().compute())


class Spearman(SpearmanCorrCoef):
    """Spearman's correlation, 0 where the predictions are all the same."""

    def compute(self) -> Tensor:
        return _defined(super().compute())


def _defined(correlation: Tensor) -> Tensor:
    return correlation.nan_to_num(nan=0.0)
