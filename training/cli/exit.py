"""The outputs of a command, and its end."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar

from rich.console import Console

from gates.errors import GateError
from gates.files import FULL, takes_nothing
from training.runs import progress

# Standard output and standard error may be closed, full or no longer read. The work continues without them.


class Outlet:
    """A stream that drops everything that cannot be written.

    Args:
        stream: The stream to write to; None if it was closed before the process began.

    Attributes:
        error: The first error of a write.
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
        """Write nowhere from here on, because the buffer would fail again when the process ends."""
        self.error = self.error or error
        with suppress(OSError, ValueError):  # a stream without a file descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)
            self.stream.flush()

    @property
    def complaint(self) -> str | None:
        """Return what went wrong; None for nothing, or if the reader has gone."""
        if self.error is None or isinstance(self.error, BrokenPipeError):
            return None
        return f"standard output cannot be written: {self.error.strerror}"


@contextmanager
def outlets() -> Iterator[Outlet]:
    """Make standard output and error outlets in a ``with`` block; yield that of standard output."""
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
    """Point the descriptors of closed streams to nowhere, so that no opened file gets them and everything that is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one


T = TypeVar("T")


class Stopped(KeyboardInterrupt):
    """Ctrl+C, with advice on how to continue."""


PIPED_WIDTH = 160
"""The number of columns without a terminal."""
LOST = re.compile(r"(gloo|NCCL).*?(Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited)", re.S)
"""The errors of PyTorch's back ends when another process is gone."""


def stdout() -> Console:
    """Return a console for standard output, as wide as the terminal, or wide enough for whole tables if it is piped."""
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if narrow else PIPED_WIDTH)


def finish(parse: Callable[[], T], work: Callable[[T], object], *, when_stopped: str) -> int:
    """Do a command's work and return its exit code: 0, 2 for input that the user can correct, 130 after Ctrl+C or SIGTERM.

    If standard output cannot be written, the work is done nevertheless, and the code is 2; or 0 if only its reader is gone.

    Args:
        parse: A function that reads the command line. It may end the process itself, as ``--help`` does.
        work: A function of the options. Either may raise :class:`GateError`, or an ``OSError`` about a file.
        when_stopped: Advice after Ctrl+C, unless the work gives its own by :func:`advised`.
    """
    with outlets() as out:
        try:
            code = _finish(parse, work, when_stopped)
        except SystemExit as stop:
            out.flush()
            if out.complaint is None:
                raise
            code = int(bool(stop.code))
        out.flush()
        if out.complaint is not None:
            print(f"error: {out.complaint}", file=sys.stderr)
            code = code or 2
    return code


def _finish(parse: Callable[[], T], work: Callable[[T], object], when_stopped: str) -> int:
    try:
        options = parse()
        with terminable(), stopped_in_destructors(), progress.displayed(), interruptible():
            work(options)
    except GateError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"stopped; {stop if isinstance(stop, Stopped) else when_stopped}", file=sys.stderr)
        return 130
    except Exception as error:
        advice = [*getattr(error, "__notes__", []), when_stopped][0]
        message = about_a_lost_process(error, advice) or about_a_file(error, advice)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0


def about_a_file(error: Exception, advice: str) -> str | None:
    """Return an error of the disk or of a file as one sentence with advice; None for other errors."""
    name = error.filename if isinstance(error, OSError) else None
    number = takes_nothing(error)
    if number in FULL:
        written = "something" if name is None else repr(name)
        return f"{written} cannot be written: {os.strerror(number)}; make room there, then: {advice}"
    if name is None:
        return None
    assert isinstance(error, OSError)
    mended = {
        errno.EROFS: "; give a place that can be written to",
        errno.EACCES: "; see to its permissions, or give another place",
        errno.EPERM: "; see to its permissions, or give another place",
    }
    return f"{name!r} cannot be read or written: {error.strerror}{mended.get(error.errno or 0, '')}"


def about_a_lost_process(error: Exception, advice: str) -> str | None:
    """Return an error that follows from another dead process of the job as one sentence with advice; None for others."""
    found = LOST.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    return f"another process of this job died ({found[2]}), see the lines above; {advice}"


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` after Ctrl+C also while Lightning trains, which turns it into ``SystemExit``."""
    try:
        yield
    except SystemExit as stop:
        raise KeyboardInterrupt from stop


@contextmanager
def terminable() -> Iterator[None]:
    """Treat SIGTERM, as schedulers send it, like Ctrl+C in a ``with`` block of the main thread: locks are released, and
    unfinished files are removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # the caller handles the signal
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def stopped_in_destructors() -> Iterator[None]:
    """Raise Ctrl+C again a moment later if it falls into a destructor, where Python ignores it. Every profiler of Lightning,
    and so every collected trainer, has one."""
    before, waiting = sys.unraisablehook, list[threading.Timer]()

    def again(lost: sys.UnraisableHookArgs) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        waiting.append(threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)))
        waiting[-1].daemon = True
        waiting[-1].start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in waiting:
            timer.cancel()


@contextmanager
def advised(advice: Callable[[], str | None]) -> Iterator[None]:
    """Add advice to Ctrl+C, a full disk and another dead process in a ``with`` block.

    Args:
        advice: A function that returns the advice at that moment, or None.
    """
    try:
        with interruptible():
            yield
    except KeyboardInterrupt as stop:
        message = advice()
        if message is None:
            raise
        raise Stopped(message) from stop
    except Exception as error:
        ended = takes_nothing(error) is not None or about_a_lost_process(error, "") is not None
        if ended and (message := advice()) is not None:
            error.add_note(message)
        raise
