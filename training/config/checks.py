"""Checks that groups of options share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

from gates.errors import GateError

LARGEST_WHOLE, LARGEST = 10**15, 1e30
"""Of whole numbers, beyond which libraries count wrong, and of others, beyond which 32 bits have only infinity."""


def check_values(group: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """What a field's type does not say of its value, or the parser does not ask.

    Args:
        group: a dataclass.
        values: its fields by name.
        prefix: what stands before the names on a command line, such as ``model.``.

    Raises:
        GateError: for nothing where something is needed, a number that is not finite or beyond all use, and a text that no
            file can hold.
    """
    hints = get_type_hints(group)
    for name, value in values.items():
        hint = hints.get(name, Any)
        if value is None and hint is not Any and NoneType not in get_args(hint):
            raise GateError(f"--{prefix}{name} is null; expected a value, or leave it out")
        if hint == dict[str, Any] | None:  # of a model's config, which has its own rules
            continue
        for part in _parts(value):
            if isinstance(part, str) and not is_text(part):
                raise GateError(f"--{prefix}{name} is {part!r}, which has characters that are no UTF-8 text; write it without")
            most = LARGEST_WHOLE if isinstance(part, int) else LARGEST
            if isinstance(part, int | float) and not -most <= part <= most:
                raise GateError(f"--{prefix}{name} is {part}; expected a finite number, at most {most:g}")


def _parts(value: Any) -> Iterator[Any]:
    """The single values in lists and mappings."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for one in value:
            yield from _parts(one)
    else:
        yield value


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode a text and a path may have it."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def at_least_0(options: object, *names: str, prefix: str = "") -> None:
    """Raises :class:`GateError` for the first of these fields that is not a finite number from 0 on; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise GateError(f"{prefix}{name} is {value}; expected 0 or more")


def above_0(options: object, *names: str, prefix: str = "") -> None:
    """Raises :class:`GateError` for the first of these fields that is not a finite number above 0; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise GateError(f"{prefix}{name} is {value}; expected a number above 0")


def at_least_1(options: object, *names: str, prefix: str = "") -> None:
    """Raises :class:`GateError` for the first of these fields that is below 1; None is allowed.

    Args:
        options: with the fields.
        names: of the fields.
        prefix: what stands before the names on a command line.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= 1:
            raise GateError(f"{prefix}{name} is {value}; expected at least 1")


def at_most(options: object, most: float, *names: str, prefix: str = "") -> None:
    """Raises :class:`GateError` for the first of these fields that is above ``most``; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value <= most:
            raise GateError(f"{prefix}{name} is {value}; expected at most {most:,}")


def check_positive(**settings: int) -> None:
    """Raises :class:`GateError` for the first setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise GateError(f"{name} is {value}; expected at least 1")
