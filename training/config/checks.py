"""Checks that groups of options share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

from gates.errors import GateError


def check_values(group: type, values: Mapping[str, Any], prefix: str = "") -> None:
    """Check that the values of a dataclass's fields are given where needed, finite, not too large, and writable as text.

    Args:
        prefix: The text before the names on a command line, such as ``model.``.
    """
    hints = get_type_hints(group)
    for name, value in values.items():
        hint = hints.get(name, Any)
        if value is None and hint is not Any and NoneType not in get_args(hint):
            raise GateError(f"--{prefix}{name} is null; give a value, or remove the option")
        if hint == dict[str, Any] | None:  # fields of a model's config, which has its own rules
            continue
        for part in _parts(value):
            if isinstance(part, str) and not is_text(part):
                raise GateError(f"--{prefix}{name} is {part!r}, which has characters that are no UTF-8 text; remove them")
            most = 10**15 if isinstance(part, int) else 1e30  # libraries and 32 bits hold no larger ones exactly
            if isinstance(part, int | float) and not -most <= part <= most:
                raise GateError(f"--{prefix}{name} is {part}; expected a finite number, at most {most:g}")


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for one in value:
            yield from _parts(one)
    else:
        yield value


def is_text(value: str) -> bool:
    """Return whether UTF-8 and a path can hold a text."""
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def check_range(
    options: object,
    *names: str,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    prefix: str = "",
) -> None:
    """Raise :class:`GateError` for the first of these fields outside a range. None is allowed, infinity is not.

    Args:
        above: The value that all numbers must exceed.
        prefix: The text before the names on a command line.
    """
    for name in names:
        value = getattr(options, name)
        if value is None:
            continue
        is_above = (least is None or value >= least) and (above is None or value > above)
        if is_above and value <= most and value < math.inf:
            continue
        if most < math.inf:
            expected = f"at most {most:,}" if least is None else f"a number from {least} to {most:,}"
        else:
            expected = f"at least {least}" if above is None else f"a number above {above}"
        raise GateError(f"{prefix}{name} is {value}; expected {expected}")
