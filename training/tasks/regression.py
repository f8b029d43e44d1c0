"""A number for each sentence: the Auto class, the loss of every example and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection, PearsonCorrCoef, SpearmanCorrCoef
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from training.tasks.base import Batch, Task
from training.tasks.classification import without_labels
from training.tasks.loading import from_config, load_pretrained, read_config

NAMES = {"num_labels": 1, "problem_type": "regression"}


@dataclass
class Regression(Task):
    """A number for each sentence, by an ``AutoModelForSequenceClassification`` with one output.

    Args:
        main_metric: ``pearson`` or ``spearman``.
    """

    main_metric: str = "pearson"

    def build(
        self,
        backbone: str | None,
        from_scratch: Mapping[str, Any] | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        trust_remote_code: bool = False,
        allow_pickle: bool = False,
    ) -> PreTrainedModel:
        """A pretrained backbone with one output, or a new one; see :meth:`Task.build`."""
        if from_scratch is not None:
            tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
            return from_config(AutoModelForSequenceClassification, {**from_scratch, **NAMES}, tokens)
        assert backbone is not None
        config = read_config(backbone, trust_remote_code=trust_remote_code)
        resized = config.num_labels != 1
        for name, value in NAMES.items():
            setattr(config, name, value)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tokenizer.pad_token_id
        return load_pretrained(
            AutoModelForSequenceClassification,
            backbone,
            config,
            what="a model of sentences",
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            resized=resized,
        )

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The squared error of every example ``[batch]``, float32, and what is predicted ``[batch, 1]``."""
        logits = model(**without_labels(batch)).logits.float()
        return torch.square(logits[:, 0] - batch["labels"]), logits

    def metrics(self, split: str) -> MetricCollection:
        """Pearson's correlation and Spearman's, of ranks, the same for every split."""
        return MetricCollection({"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()}, compute_groups=False)

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics.update(logits[:, 0], batch["labels"])

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Numbers, of the model and as they should be."""
        return logits[:, 0], batch["labels"]

    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        return without_labels(batch)

    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        mask = batch.get("attention_mask")
        return {"encoder": mask, "decoder": mask, "cross": mask}
