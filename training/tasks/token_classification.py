"""A tag for each word: the Auto class, the loss of every sentence and the metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from transformers import AutoModelForTokenClassification, PreTrainedModel

from training.tasks.base import IGNORED, Batch, TokenMeans, tokens_of
from training.tasks.causal_lm import TokenAccuracy, token_losses
from training.tasks.classification import SentenceTask, label_names

# Entities in the tags of words, and the F1 of entities over a whole split.
#
# Strict, as in seqeval's strict mode with IOB2 and IOBES: an entity is right if its first word, last word and name are right.
# Tags that make no whole entity make none. (seqeval itself needs scikit-learn and had its last release in 2020.)

OUTSIDE = "O"
SAME = {"L": "E", "U": "S"}
"""BILOU's names of the parts of entities by those of IOBES."""
Scheme = Literal["BIO", "IOBES"]
Entity = tuple[int, int, str]
"""First word, the word behind the last one, and name."""


def scheme_of(tags: Collection[str]) -> Scheme | None:
    """Return how tags mark entities; None for tags that do not, such as parts of speech.

    >>> scheme_of(["O", "B-PER", "I-PER"]), scheme_of(["O", "S-PER", "B-PER", "E-PER"]), scheme_of(["NOUN", "VERB"])
    ('BIO', 'IOBES', None)
    """
    parts = {_part(tag)[0] for tag in tags if tag != OUTSIDE}
    if not parts or not parts <= set("BIESLU"):
        return None
    return "BIO" if parts <= set("BI") else "IOBES"


def seqeval_scheme(tags: Collection[str]) -> str:
    """Return seqeval's name for the scheme of tags that mark entities.

    >>> seqeval_scheme(["O", "B-PER", "I-PER"]), seqeval_scheme(["O", "U-PER", "B-PER", "L-PER"])
    ('IOB2', 'BILOU')
    """
    if scheme_of(tags) == "BIO":
        return "IOB2"
    return "BILOU" if any(_part(tag)[0] in SAME for tag in tags) else "IOBES"


def entities(tags: Sequence[str], scheme: Scheme) -> set[Entity]:
    """Return the entities of a sentence.

    BIO: an entity begins with B and continues with I of the same name. IOBES: it is a single S, or B, any number of I, and E.
    BILOU is the same under other letters.

    >>> sorted(entities(["B-PER", "I-PER", "O", "B-LOC", "I-PER"], "BIO"))
    [(0, 2, 'PER'), (3, 4, 'LOC')]
    """
    found: set[Entity] = set()
    begin, kind = None, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        part, name = _part(tag)
        part = SAME.get(part, part)
        goes_on = begin is not None and part in ("I", "E") and name == kind
        if begin is not None and not goes_on:
            if scheme == "BIO":
                found.add((begin, place, kind))
            begin = None
        if begin is not None and part == "E":
            found.add((begin, place + 1, kind))
            begin = None
        elif part == "S":
            found.add((place, place + 1, name))
        elif part == "B":
            begin, kind = place, name
    return found


def stray_tag(tags: Sequence[str], scheme: Scheme) -> int | None:
    """Return the first word whose tag belongs to no whole entity; None where all do."""
    covered = {place for begin, end, _ in entities(tags, scheme) for place in range(begin, end)}
    return next((place for place, tag in enumerate(tags) if tag != OUTSIDE and place not in covered), None)


def _part(tag: str) -> tuple[str, str]:
    """Return the part of an entity, and the entity's name."""
    part, _, name = tag.partition("-")
    return part, name


def entity_counts(predicted: Iterable[Sequence[str]], true: Iterable[Sequence[str]], scheme: Scheme) -> NDArray[np.int64]:
    """Return the number of right, predicted and true entities of every sentence, ``[sentences, 3]``."""
    rows = []
    for own, gold in zip(predicted, true, strict=True):
        found, wanted = entities(own, scheme), entities(gold, scheme)
        rows.append((len(found & wanted), len(found), len(wanted)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def entity_f1(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return F1 over all entities (micro) from sums or means of :func:`entity_counts` ``[..., 3]``; 0 where there are none."""
    right, both = counts[..., 0].astype(np.float64), (counts[..., 1] + counts[..., 2]).astype(np.float64)
    return np.divide(2 * right, both, out=np.zeros_like(both), where=both > 0)


class EntityF1(Metric):
    """F1 of whole entities over a split, in any batching and under DDP.

    >>> metric = EntityF1("BIO")
    >>> metric.update([["B-PER", "I-PER", "O"]], [["B-PER", "I-PER", "B-LOC"]])
    >>> round(float(metric.compute()), 4)
    0.6667
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    counts: Tensor

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme: Scheme = scheme
        self.add_state("counts", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> None:
        """Add sentences, by the tags of their words."""
        counts = entity_counts(predicted, true, self.scheme).sum(axis=0)
        self.counts += torch.tensor(counts, dtype=torch.float64, device=self.counts.device)

    def compute(self) -> Tensor:
        return torch.tensor(float(entity_f1(self.counts.cpu().numpy())), dtype=torch.float64)


@dataclass
class TokenClassification(TokenMeans, SentenceTask):
    """A tag for each word, by an ``AutoModelForTokenClassification``. An example is a sentence. The tag of a word is predicted
    at its first piece; there is no prediction at its others.

    Args:
        labels: The tags; a tag's position is its number.
        scheme: How tags mark entities; None where they do not.
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
        """Return the mean cross-entropy of every sentence's words ``[batch]``, float32, and the logits ``[batch, position,
        tags]``."""
        logits = model(**self.model_inputs(model, batch)).logits.float()
        labels = batch["labels"]
        return token_losses(logits, labels).sum(-1) / tokens_of(labels), logits

    def metrics(self, split: str) -> MetricCollection:
        """Return the share of words whose tag is right, and F1 of entities where tags mark them, the same for every split."""
        metrics: dict[str, Metric | MetricCollection] = {"token_accuracy": TokenAccuracy()}
        if self.scheme is not None:
            metrics["entity_f1"] = EntityF1(self.scheme)
        return MetricCollection(metrics, compute_groups=False)

    def metric_types(self) -> dict[str, dict[str, Any]]:
        """Return the metrics of ``evaluate``. Entities are those of seqeval's strict mode, since its default has more."""
        types: dict[str, dict[str, Any]] = {"token_accuracy": {"type": "accuracy"}}
        if self.scheme is not None:
            types["entity_f1"] = {"type": "seqeval", "args": {"mode": "strict", "scheme": seqeval_scheme(self.labels)}}
        return types

    def update(self, metrics: MetricCollection, model: PreTrainedModel, batch: Batch, logits: Tensor) -> None:
        metrics["token_accuracy"].update(logits, batch["labels"])
        if "entity_f1" in metrics:
            metrics["entity_f1"].update(*self._tags(logits, batch["labels"]))

    def predictions(self, logits: Tensor, batch: Batch) -> tuple[list[str], list[str]]:
        """Return the predicted and the true tags of every sentence, with spaces between them."""
        predicted, true = self._tags(logits, batch["labels"])
        return [" ".join(tags) for tags in predicted], [" ".join(tags) for tags in true]

    def _tags(self, logits: Tensor, labels: Tensor) -> tuple[list[list[str]], list[list[str]]]:
        counted = (labels != IGNORED).cpu()
        rows = [
            [[self.labels[number] for number in row[kept].tolist()] for row, kept in zip(numbers.cpu(), counted, strict=True)]
            for numbers in (logits.argmax(-1), labels)
        ]
        return rows[0], rows[1]
