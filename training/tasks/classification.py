"""Sentence classification: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassF1Score, MulticlassMatthewsCorrCoef
from transformers import PreTrainedModel

from training.tasks.base import Batch
from training.tasks.loading import read_config
from training.tasks.sentences import SentenceTask, label_names


class F1OfSecondClass(BinaryF1Score):
    """F1 of the second of two classes, from logits ``[batch, 2]``."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.argmax(-1), target)


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
        classes = len(self.labels)
        metrics: dict[str, Metric | MetricCollection] = {
            "accuracy": MulticlassAccuracy(classes, average="micro"),
            "f1": MulticlassF1Score(classes, average="macro"),
            "matthews": MulticlassMatthewsCorrCoef(classes),
        }
        if self.main_metric == "binary_f1":
            metrics["binary_f1"] = F1OfSecondClass()
        return MetricCollection(metrics)

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
