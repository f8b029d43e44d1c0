"""Sentence classification: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryF1Score, MulticlassAccuracy, MulticlassF1Score, MulticlassMatthewsCorrCoef
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from training.tasks.base import Batch, Task
from training.tasks.loading import from_config, load_pretrained, read_config


class F1OfSecondClass(BinaryF1Score):
    """F1 of the second of two classes, from logits ``[batch, 2]``."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.argmax(-1), target)


@dataclass
class Classification(Task):
    """Sentence classification with an ``AutoModelForSequenceClassification``.

    Args:
        labels: class names; a class's position is its number. With ``binary_f1`` the second one is the positive one.
        main_metric: ``accuracy``, ``f1``, ``binary_f1`` or ``matthews``.
    """

    labels: list[str]
    main_metric: str = "accuracy"

    def build(
        self,
        backbone: str | None,
        from_scratch: Mapping[str, Any] | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> PreTrainedModel:
        """A pretrained backbone with a classifier for the labels, or a new one; see :meth:`Task.build`."""
        names = {
            "num_labels": len(self.labels),
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: index for index, label in enumerate(self.labels)},
        }
        if from_scratch is not None:
            tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
            model = from_config(AutoModelForSequenceClassification, {**from_scratch, **names}, tokens)
            if model.config.is_encoder_decoder:  # which reads its answer at the end of the text, and begins as T5 does
                ends = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
                for name, value in {"eos_token_id": ends, "decoder_start_token_id": tokenizer.pad_token_id}.items():
                    setattr(model.config, name, from_scratch.get(name, value))
            return model
        assert backbone is not None
        config = read_config(backbone, trust_remote_code=trust_remote_code)
        resized = config.num_labels != len(self.labels)
        for name, value in names.items():
            setattr(config, name, value)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        return load_pretrained(
            AutoModelForSequenceClassification,
            backbone,
            config,
            what="a classifier",
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            resized=resized,
        )

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross-entropy of every example ``[batch]``, float32, and the logits ``[batch, classes]``."""
        logits = model(**without_labels(batch)).logits.float()
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

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits, batch["labels"])

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        return without_labels(batch)

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        mask = batch.get("attention_mask")
        return {"encoder": mask, "decoder": mask, "cross": mask}


def without_labels(batch: Batch) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


def stated_labels(backbone: str | None, *, trust_remote_code: bool = False) -> list[str] | None:
    """The class names that a fine-tuned checkpoint states, in its order; None for placeholders like LABEL_0."""
    if backbone is None:
        return None
    config = read_config(backbone, trust_remote_code=trust_remote_code)
    names = [str(name) for _, name in sorted(config.id2label.items())]
    return None if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names
