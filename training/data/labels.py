"""Check that labels are classes, or numbers. Nothing here loads PyTorch, so a wrong file is refused at once."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from gates.errors import GateError

SHOWN = 8
"""Classes in a message."""
SEVERAL = re.compile(r"[\[(][\d\s.,]*[\])]|\[\s*(['\"]).*\1\s*\]|\{\s*['\"].*:.*\}|[01]([,;\s]+[01])+")
"""Several labels as text: ``[0, 1, 0]``, ``['sad', 'angry']``, ``0,1,0``, or a JSON object."""


def check_classes(labels: Mapping[str, list[str]]) -> None:
    """Raises :class:`GateError` for labels that are no classes: in the training split empty ones, one alone, or nearly as many
    as examples; in the others, labels that the training split has not.

    Args:
        labels: The labels of the examples of each split, with ``train`` among them.
    """
    classes, total = sorted(set(labels["train"])), len(labels["train"])
    if several := next((label for label in classes if SEVERAL.fullmatch(label)), None):
        raise GateError(
            f"the label column has {several!r}, several values for one example; expected one class for each: give the classes "
            "as one name, or train a model for each class"
        )
    if missing := next((label for label in classes if label.lower() == "nan"), None):
        raise GateError(f"the label column has {missing!r}, which stands for a missing value; give every example a class")
    written: dict[str, str] = {}
    for label in classes:
        if (other := written.setdefault(_same(label), label)) != label:
            raise GateError(f"the label column has {other!r} and {label!r}, which look like one class; write it in one way")
    if fraction := next((label for label in classes if _is_fraction(label)), None):
        raise GateError(
            f"the label column has the number {fraction!r}; expected classes. Numbers to predict are "
            "--data Ratings; if these are classes, give them names"
        )
    if len(classes) > max(2, 0.9 * total):
        raise GateError(
            f"the label column has {len(classes)} different values in {total} training examples (such as {classes[0]!r}); "
            "expected classes; numbers to predict are --data Ratings"
        )
    if "" in classes:
        raise GateError("the training split has an example with an empty label; give every example a class")
    if len(classes) < 2:
        raise GateError(f"all training examples have the label {classes[0]!r}; expected at least two classes")
    for name, values in labels.items():
        if unknown := sorted(set(values) - set(classes)):
            raise GateError(
                f"the {name} split has the label {unknown[0]!r} (example {values.index(unknown[0]) + 1}), which is not among "
                f"the classes of the training split ({_listed(classes)}); correct the file or the label column"
            )


def check_numbers(labels: Mapping[str, list[str]]) -> dict[str, float]:
    """The numbers that the labels of all splits are, by label.

    Args:
        labels: The labels of the examples of each split.

    Raises:
        GateError: for a label that is no number, and for a split that has one number alone.
    """
    numbers: dict[str, float] = {}
    for split, own in labels.items():
        for row, label in enumerate(own, 1):
            if label not in numbers:
                numbers[label] = _number(label, split, row)
        if len({numbers[label] for label in own}) < 2:
            raise GateError(f"all examples of the {split} split have the number {own[0]!r}; expected at least two numbers")
    return numbers


def _number(label: str, split: str, row: int) -> float:
    try:
        value = float(label) if label.isascii() and "_" not in label else math.nan  # which Python would read as numbers
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise GateError(
            f"the {split} split has the label {label!r} (example {row}); expected a number to predict. If these are classes, "
            "give --data Text"
        )
    return value


def _same(label: str) -> str:
    """What classes that are written in several ways have in common: the number, or the letters in lower case."""
    return label.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", label) else label.lower()


def _is_fraction(label: str) -> bool:
    """Whether a label is a number with decimals, as measurements have."""
    try:
        return not float(label).is_integer() and math.isfinite(float(label))
    except ValueError:
        return False


def _listed(classes: list[str]) -> str:
    """The first classes."""
    return ", ".join(map(repr, classes[:SHOWN])) + (f" and {len(classes) - SHOWN} more" if len(classes) > SHOWN else "")
