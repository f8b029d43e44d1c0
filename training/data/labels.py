"""Check that labels are classes, or numbers. Nothing here loads PyTorch, so a wrong file is refused at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from gates.errors import GateError

SEVERAL = re.compile(r"[\[(][\d\s.,]*[\])]|\[\s*(['\"]).*\1\s*\]|\{\s*['\"].*:.*\}|[01]([,;\s]+[01])+")
"""Several labels in one text: ``[0, 1, 0]``, ``['sad', 'angry']``, ``0,1,0``, or a JSON object."""


def in_order(classes: Iterable[str]) -> list[str]:
    """Return each class once: numbers by their value, then the others by their letters."""
    return sorted(set(classes), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))


def check_classes(labels: Mapping[str, list[str]]) -> list[str]:
    """Return the classes of the training split, in order."""
    classes, total = sorted(set(labels["train"])), len(labels["train"])
    if several := next((label for label in classes if SEVERAL.fullmatch(label)), None):
        raise GateError(
            f"the label column has {several!r}, several values for one example; expected one class; give the classes as one "
            "name, or train a model for each class"
        )
    if missing := next((label for label in classes if label.lower() == "nan"), None):
        raise GateError(f"the label column has {missing!r}, which means a missing value; give every example a class")
    written: dict[str, str] = {}
    for label in classes:
        if (other := written.setdefault(_written_in_one_way(label), label)) != label:
            raise GateError(f"the label column has {other!r} and {label!r}, which look like one class; use one spelling")
    if fraction := next((label for label in classes if math.isfinite(value := _number(label)) and value % 1), None):
        raise GateError(
            f"the label column has the number {fraction!r}; expected classes; give --data Ratings to predict numbers, or "
            "names to the classes"
        )
    if len(classes) > max(2, 0.9 * total):
        raise GateError(
            f"the label column has {len(classes)} different values in {total} training examples (such as {classes[0]!r}); "
            "expected classes; give --data Ratings to predict numbers"
        )
    if "" in classes:
        raise GateError("the training split has an example with an empty label; give every example a class")
    if len(classes) < 2:
        raise GateError(f"all training examples have the label {classes[0]!r}; expected at least two classes")
    for name, values in labels.items():
        if unknown := sorted(set(values) - set(classes)):
            listed = ", ".join(map(repr, classes[:8])) + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")
            raise GateError(
                f"the {name} split has the label {unknown[0]!r} (example {values.index(unknown[0]) + 1}); expected a class of "
                f"the training split ({listed}); correct the file or the label column"
            )
    return in_order(classes)


def check_numbers(labels: Mapping[str, list[str]]) -> dict[str, float]:
    """Return the number of each label of any split."""
    numbers: dict[str, float] = {}
    for split, own in labels.items():
        for row, label in enumerate(own, 1):
            if label not in numbers:
                numbers[label] = _number(label) if label.isascii() and "_" not in label else math.nan  # Python reads 1_000
                if not math.isfinite(numbers[label]):
                    raise GateError(
                        f"the {split} split has the label {label!r} (example {row}); expected a number to predict; give "
                        "--data Text for classes"
                    )
        if len({numbers[label] for label in own}) < 2:
            raise GateError(f"all examples of the {split} split have the number {own[0]!r}; expected at least two numbers")
    return numbers


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan


def _written_in_one_way(label: str) -> str:
    """Return the number without ``.0``, or the letters in lower case."""
    return label.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", label) else label.lower()
