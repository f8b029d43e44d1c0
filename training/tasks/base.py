"""What the rest of the application asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchmetrics import MetricCollection
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.config import Source

Batch = Mapping[str, Any]
"""Tensors by name; for evaluation also lists of texts."""


class Task(ABC):
    """The Auto class, the loss of every example and the metrics of a kind of problem.

    Attributes:
        main_metric: name of the metric by which choices are made.
        lower_is_better: whether a lower value of it is better, as of a perplexity.
    """

    main_metric: str
    lower_is_better: bool = False

    def gain(self, value: float) -> float:
        """A value of the main metric turned so that more is better."""
        return -value if self.lower_is_better else value

    @abstractmethod
    def build(self, source: Source, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A pretrained model for the task, exports of this project too, or a new one from config fields.

        Args:
            source: of the model.
            tokenizer: of the data.

        Raises:
            GateError: if the backbone cannot be loaded or is not for this task.
        """

    @abstractmethod
    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of every example ``[batch]``, float32, and the logits."""

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """What training minimises, from the losses of a batch: by default their mean."""
        return losses.mean()

    def batch_weight(self, batch: Batch) -> float:
        """How much the batch of one process counts in the mean over the batches of all; they count alike by default."""
        return 1.0

    def example_weights(self, batch: Batch) -> Tensor | float:
        """How much each example ``[batch]`` counts in the mean loss of a split; they count alike by default."""
        return 1.0

    @abstractmethod
    def metrics(self, split: str) -> MetricCollection:
        """New metrics of a split (``select`` or ``test``)."""

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Those metrics that Hugging Face's ``evaluate`` has too, as :data:`gates.export.evaluation.MetricTypes`; none by
        default."""
        return {}

    @abstractmethod
    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        """Add a batch to the metrics.

        Args:
            metrics: that :meth:`metrics` made.
            model: in evaluation mode, with the gates as they are.
            batch: of a split's loader.
            logits: as :meth:`losses` returned them.
        """

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[Tensor | list[str], Tensor | list[str]]:
        """What statistics keep of each example ``[batch]``, numbers or texts: what is predicted, and what would have been
        right; by default classes."""
        return logits.argmax(-1), batch["labels"]

    def outputs(self, metrics: MetricCollection) -> dict[str, list[str]]:
        """What the metrics saw the model say, by example of the split in its order; nothing by default."""
        return {}

    @abstractmethod
    def model_inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """What of a batch goes into one forward pass of the model."""

    @abstractmethod
    def valid_queries(self, batch: Batch) -> dict[str, Tensor | None]:
        """Which queries are not padding ``[batch, query]``, for each kind of attention; None if all count."""
