"""Checks that groups of options share."""

from __future__ import annotations

import math

from gates.errors import GateError


def at_least_0(options: object, *names: str) -> None:
    """Raises :class:`GateError` for the first of these fields that is not a finite number from 0 on; None is allowed."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value < math.inf:
            raise GateError(f"{name} is {value}; expected 0 or more")


def at_least_1(options: object, *names: str, prefix: str = "") -> None:
    """Raises :class:`GateError` for the first of these fields that is below 1.

    Args:
        options: with the fields.
        names: of the fields.
        prefix: what stands before the names on a command line.
    """
    for name in names:
        if getattr(options, name) < 1:
            raise GateError(f"{prefix}{name} is {getattr(options, name)}; expected at least 1")


def check_positive(**settings: int) -> None:
    """Raises :class:`GateError` for the first setting below 1."""
    for name, value in settings.items():
        if value < 1:
            raise GateError(f"{name} is {value}; expected at least 1")
