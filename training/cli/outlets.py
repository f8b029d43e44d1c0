"""Standard output and standard error that may be closed, full or read no more: the work goes on without them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Outlet:
    """A stream that drops what cannot be written.

    Args:
        stream: to write to; None for one that was closed before the process began.

    Attributes:
        error: the first that a write ended with.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _drop(self, error: OSError) -> None:
        """Write nowhere from now on: what is buffered would fail again when the process ends."""
        self.error = self.error or error
        with suppress(OSError, ValueError):  # a stream without a file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()

    @property
    def complaint(self) -> str | None:
        """What went wrong; None for nothing, or if the reader has seen enough and gone."""
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return None
        return f"standard output cannot be written: {self.error.strerror}"


@contextmanager
def outlets() -> Iterator[Outlet]:
    """Standard output and error as outlets in a ``with`` block; gives that of standard output."""
    _occupy_closed()
    before = sys.stdout, sys.stderr
    out, errors = Outlet(sys.stdout), Outlet(sys.stderr)
    sys.stdout, sys.stderr = out, errors
    try:
        yield out
    finally:
        out.flush()
        errors.flush()
        if sys.stdout is out:  # another library may have put its own in place
            sys.stdout = before[0]
        if sys.stderr is errors:
            sys.stderr = before[1]
        for outlet, stream in zip((out, errors), before, strict=True):
            if stream is None:
                outlet.stream.close()


def _occupy_closed() -> None:
    """Give the descriptors of closed streams to nowhere, so that no file that is opened gets them with all that is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
