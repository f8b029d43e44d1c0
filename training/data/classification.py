"""What every classification data set has in common: its classes."""

from __future__ import annotations

from collections.abc import Mapping

from gates.errors import GateError
from training.config.classification import POSITIVE
from training.config.data import ClassificationOptions
from training.data.labels import check_classes
from training.data.sentences import SentenceData
from training.tasks import Classification


class ClassificationData(SentenceData):
    """Sentences or pairs of sentences with a class each.

    Args:
        options: what the data are told.

    Attributes:
        labels: names of the classes, in their order.
    """

    options: ClassificationOptions

    def __init__(self, options: ClassificationOptions) -> None:
        super().__init__(options)
        self.labels: list[str] = []

    def numbers_of(self, labels: Mapping[str, list[str]], stated_labels: list[str] | None) -> dict[str, float]:
        """The number of each class, in the order that a fine-tuned model states, where it states the same ones."""
        numbers, self.labels = ordered_classes(_classes(labels), stated_labels, self.options)
        return numbers

    @property
    def task(self) -> Classification:
        return Classification(self.labels, self.options.metric)


def ordered_classes(
    classes: list[str], stated_labels: list[str] | None, options: ClassificationOptions
) -> tuple[dict[str, float], list[str]]:
    """The number of each class, and the classes in their order: that of a fine-tuned model, where it states the same ones.

    Args:
        classes: sorted.
        stated_labels: names of the classes of a fine-tuned model, in its order.
        options: which class is the positive one.
    """
    position = {name.lower(): index for index, name in enumerate(stated_labels or [])}
    are_stated = {label.lower() for label in classes} == set(position)
    labels = sorted(classes, key=lambda label: position[label.lower()]) if are_stated else classes
    if options.metric == "binary_f1":
        labels = _positive_last(labels, options.positive, are_stated=are_stated)
    return {label: position for position, label in enumerate(labels)}, labels


def _positive_last(labels: list[str], positive: str | None, *, are_stated: bool) -> list[str]:
    """Two classes with the positive one behind the other.

    Args:
        labels: in their order.
        positive: named by the user.
        are_stated: whether a fine-tuned model has them in this order.

    Raises:
        GateError: unless there are two classes, one of them positive, and the order is free.
    """
    names = " and ".join(map(repr, labels)) if len(labels) == 2 else f"{len(labels)} in number"
    if len(labels) != 2:
        raise GateError(f"--data.metric binary_f1 is of two classes, and the classes are {names}; choose f1, the mean over all")
    chosen = positive or POSITIVE
    if chosen not in labels:
        asked = f"positive is {positive!r}" if positive else "it is not said which class is positive"
        raise GateError(f"{asked}, and the classes are {names}; give one of them with --data.positive")
    if are_stated and labels[1] != chosen:
        raise GateError(
            f"the model states the classes {names} in this order, and binary_f1 is of the second; give --data.positive "
            f"{labels[1]!r}, or choose f1"
        )
    return [label for label in labels if label != chosen] + [chosen]


def _classes(found: Mapping[str, list[str]]) -> list[str]:
    """The classes of the training split, sorted; other splits must not have more."""
    labels = sorted(set(found["train"]), key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
    check_classes(found)
    return labels
