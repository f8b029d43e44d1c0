"""What a command prints to, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console

from gates.errors import GateError
from training.runs import progress

T = TypeVar("T")


class Stopped(KeyboardInterrupt):
    """Ctrl+C, with what the user can do then."""


PIPED_WIDTH = 160
"""Columns, where there is no terminal that has a width."""


def stdout() -> Console:
    """For standard output: as wide as the terminal, and wide enough for whole tables where it is piped or written to a file."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if narrow else PIPED_WIDTH)


def finish(parse: Callable[[], T], work: Callable[[T], object], *, when_stopped: str) -> int:
    """Do a command's work and return its exit code: 0, 2 for input that its user can mend, 130 after Ctrl+C.

    Args:
        parse: reads the command line; it may end the process itself, as ``--help`` does.
        work: gets what it read. Either may raise :class:`GateError`, or an ``OSError`` about a file.
        when_stopped: what the user can do after Ctrl+C, where the work does not say it by :func:`advised`.
    """
    try:
        options = parse()
        with progress.displayed(), interruptible():
            work(options)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt as stop:
        print(f"stopped; {stop if isinstance(stop, Stopped) else when_stopped}", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is None:  # not of a file that the user named or a disk that is full
            raise
        print(f"error: {error.filename!r} cannot be read or written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl+C as ``KeyboardInterrupt`` also while Lightning trains, which makes ``SystemExit`` of it."""
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich ends the process then
            raise stop.__context__ from None
        raise KeyboardInterrupt from stop


@contextmanager
def advised(advice: Callable[[], str | None]) -> Iterator[None]:
    """Ctrl+C in a ``with`` block is told with this advice.

    Args:
        advice: says what the user can do, as things are when the work is stopped; None where it has nothing to say.
    """
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as stop:
        said = advice()
        if said is None:
            raise
        raise Stopped(said) from stop
