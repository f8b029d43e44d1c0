"""A tag for each word: the Auto class, the loss of every sentence and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from torchmetrics import Metric, MetricCollection
from transformers import AutoModelForTokenClassification, PreTrainedModel

from training.tasks.base import Batch
from training.tasks.causal_lm import token_losses
from training.tasks.encoding import IGNORED, tokens_of
from training.tasks.entities import EntityF1, Scheme, seqeval_scheme
from training.tasks.perplexity import TokenAccuracy
from training.tasks.sentences import SentenceTask, label_names


@dataclass
class TokenClassification(SentenceTask):
    """A tag for each word, by an ``AutoModelForTokenClassification``. An example is a sentence; the tag of a word is predicted
    at its first piece, and nothing is at the others.

    Args:
        labels: the tags; a tag's position is its number.
        scheme: how tags stand for entities; None where they do not.
        main_metric: ``token_accuracy`` or ``entity_f1``.
    """

    auto: ClassVar[Any] = AutoModelForTokenClassification
    what: ClassVar[str] = "a model that tags words"

    labels: list[str]
    scheme: Scheme | None = None
    main_metric: str = "token_accuracy"

    @property
    def label_fields(self) -> dict[str, Any]:
        return label_names(self.labels)

    def losses(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy of every sentence's words ``[batch]``, float32, and the logits ``[batch, position, tags]``."""
        logits = model(**self.model_inputs(model, batch)).logits.float()
        labels = batch["labels"]
        return token_losses(logits, labels).sum(-1) / tokens_of(labels), logits

    def batch_loss(self, losses: Tensor, batch: Batch) -> Tensor:
        """The mean over all words of the batch."""
        words = tokens_of(batch["labels"])
        return (losses * words).sum() / words.sum()

    def batch_weight(self, batch: Batch) -> float:
        """Its words, so that every word counts alike in whatever process it is."""
        return float(tokens_of(batch["labels"]).sum())

    def example_weights(self, batch: Batch) -> Tensor:
        """Its words: the loss of a split is a mean over words."""
        return tokens_of(batch["labels"])

    def metrics(self, split: str) -> MetricCollection:
        """The share of words whose tag is right, and F1 of entities where tags stand for such, the same for every split."""
        metrics: dict[str, Metric | MetricCollection] = {"token_accuracy": TokenAccuracy()}
        if self.scheme is not None:
            metrics["entity_f1"] = EntityF1(self.scheme)
        return MetricCollection(metrics, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Entities are seqeval's in its strict mode; its default takes more for entities."""
        types: dict[str, dict[str, Any]] = {"token_accuracy": {"type": "accuracy"}}
        if self.scheme is not None:
            types["entity_f1"] = {"type": "seqeval", "args": {"mode": "strict", "scheme": seqeval_scheme(self.labels)}}
        return types

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics["token_accuracy"].update(logits, batch["labels"])
        if "entity_f1" in metrics:
            metrics["entity_f1"].update(*self._tags(logits, batch["labels"]))

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[list[str], list[str]]:
        """The tags of every sentence, of the model and as they should be, with spaces between them."""
        predicted, true = self._tags(logits, batch["labels"])
        return [" ".join(tags) for tags in predicted], [" ".join(tags) for tags in true]

    def _tags(self, logits: Tensor, labels: Tensor) -> tuple[list[list[str]], list[list[str]]]:
        """The names of every sentence's tags, of the model and as they should be."""
        counted = (labels != IGNORED).cpu()
        rows = [
            [[self.labels[number] for number in row[kept].tolist()] for row, kept in zip(numbers.cpu(), counted, strict=True)]
            for numbers in (logits.argmax(-1), labels)
        ]
        return rows[0], rows[1]
