"""One command at a time writes into a directory. The lock ends with its process, however that ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from gates.errors import GateError
from gates.files import naming

LOCK = ".lock"
WAIT = 6.0
"""Seconds that what a killed process has started, such as the workers that load its data, may live on and hold its lock."""


@contextmanager
def only_writer(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """No other process writes into this directory in the ``with`` block. It is made, and goes again if nothing comes into it.

    Args:
        folder: the directory.
        wait: whether what a killed process has left behind is given time to end.

    Raises:
        GateError: if another process does, or it is or lies in a file.
    """
    refuse_file(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as at_the_end:
        for place in reversed(made):
            at_the_end.callback(_remove_if_empty, place)
        lock = _acquired(folder, WAIT if wait else 0.0)
        at_the_end.callback(lock.release)
        at_the_end.callback(_unlink, folder / LOCK)  # while it is held
        with naming(folder):
            yield


def refuse_file(folder: Path) -> None:
    """Raises :class:`GateError` for a directory that is or lies in a file."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise GateError(f"--run_dir {str(folder)!r} is or lies in a file ({str(place)!r}); give a directory")


def refuse_busy(folder: Path) -> None:
    """Raises :class:`GateError` if another process writes into a directory."""
    if (folder / LOCK).is_file():
        _acquired(folder, WAIT).release()


def is_abandoned(folder: Path) -> bool:
    """Whether a directory holds nothing but the lock of a process that is gone."""
    if not folder.is_dir() or [path.name for path in folder.iterdir()] != [LOCK]:
        return False
    try:
        _acquired(folder, 0.0).release()
    except GateError:
        return False
    return True


def _acquired(folder: Path, wait: float) -> FileLock:
    """The lock of a directory, held."""
    if os.path.lexists(folder / LOCK) and not (folder / LOCK).is_file():
        raise GateError(f"{str(folder / LOCK)!r} is no regular file, so it locks nothing; remove it")
    lock = FileLock(folder / LOCK)
    while True:
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            raise GateError(
                f"another process is at work in {str(folder)!r}; wait for it, end it, or give another directory"
            ) from error
        if (folder / LOCK).is_file():
            return lock
        lock.release()  # the one before has removed it since this one opened it, so that it tells nobody anything


def _unlink(path: Path) -> None:
    with suppress(OSError):  # Windows keeps open files
        path.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
