"""Write files and folders that are complete or missing, even after a process is killed or the power fails.

A new file is written as ``.NAME.partial-PROCESS`` in the same folder, synced to the disk, and then renamed. The next write of
the same name removes leftovers of killed processes. A full disk raises an ``OSError`` that names the file, whatever error the
library raised.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gates.errors import GateError

PARTIAL = re.compile(r"\..+\.partial-(?P<process>\d+)")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a system without room: on the disk, in the user's quota, or for a file of this size."""
IN_WORDS = (
    (re.compile(r"\(os error (?P<number>\d+)\)"), None),  # Rust's: safetensors, tokenizers
    (re.compile(r"No space left on device"), errno.ENOSPC),
    (re.compile(r"database or disk is full"), errno.ENOSPC),  # SQLite's
)
"""The messages of libraries with other error classes."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary name, and rename the file to ``path`` if the block succeeds. A symbolic link stays, not its target."""
    path = Path(os.path.realpath(path))
    refuse_other_than_file(path)
    remove_left_behind(path)
    partial = partial_of(path)
    try:
        with naming(path):
            yield partial
            bring_to_disk(partial)
            partial.replace(path)
            bring_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn errors of a full disk into an ``OSError`` with the system's number, its message, and the final name of the file."""
    try:
        yield
    except GateError:  # has a better message
        raise
    except Exception as error:
        named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
        number = takes_nothing(error)
        if number is None or (named is not None and ".partial-" not in named):
            raise
        failure = OSError(number, os.strerror(number), str(path))
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error


def takes_nothing(error: BaseException) -> int | None:
    """Return the system's error number if a full or unwritable disk caused an error; else None."""
    seen: set[int] = set()
    reason: BaseException | None = error
    while reason is not None and id(reason) not in seen:
        seen.add(id(reason))
        number = reason.errno if isinstance(reason, OSError) else None
        for words, stated in IN_WORDS if number is None else ():
            if (found := words.search(str(reason))) is not None:
                number = stated or int(found["number"])
        if number in (*FULL, errno.EROFS, errno.EIO):
            return number
        reason = reason.__cause__ or reason.__context__
    return None


@contextmanager
def written_whole(directory: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory, and rename it to ``directory`` on success or remove it on failure.

    Args:
        directory: The directory, new or empty. A link stays, and its target is filled.
        overwrite: Whether the directory may have content, which goes.
    """
    directory = Path(os.path.realpath(directory))
    remove_left_behind(directory)
    partial = partial_of(directory)
    remove(partial)
    try:
        with naming(directory):
            partial.mkdir(parents=True)
            yield partial
            bring_all_to_disk(partial)
            old = partial.with_name(f"{partial.name}-replaced")
            if overwrite:
                directory.rename(old)
            elif directory.exists():
                directory.rmdir()
            partial.rename(directory)
            bring_to_disk(directory.parent)
            remove(old)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_json(path: str | os.PathLike[str], what: str) -> Any:
    """Return the content of a JSON file; raise :class:`GateError`, which calls the file ``what``, if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise GateError(f"cannot read the {what} {os.fspath(path)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise GateError(f"{os.fspath(path)!r} is not a {what}: it is not JSON ({error})") from error


def partial_of(path: Path) -> Path:
    """Return the temporary name of this process for ``path``."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def is_partial(path: Path) -> bool:
    """Return whether this is a temporary name, in use or left by a killed process."""
    return PARTIAL.fullmatch(path.name) is not None


def remove_left_behind(path: Path) -> None:
    """Remove temporary files for ``path`` of processes that no longer exist."""
    for left in path.parent.glob(f".{_literal(path.name)}.partial-*"):
        named = PARTIAL.fullmatch(left.name)
        if named is not None and _is_gone(int(named["process"])):
            remove(left)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bring_all_to_disk(folder: Path) -> None:
    """Sync a folder and all its content to the disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            bring_to_disk(path)
    bring_to_disk(folder)


def bring_to_disk(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk. Some systems only detect a full disk here."""
    if path.is_dir() and os.name == "nt":  # no such thing there
        return
    number = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that cannot do it
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(number)


def _literal(name: str) -> str:
    """Escape a name for ``glob``."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _is_gone(process: int) -> bool:
    if os.name == "nt":  # os.kill would end the process
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's
        return False
    return False


def refuse_other_than_file(path: str | os.PathLike[str]) -> None:
    """Raise :class:`GateError` for a path that exists and is not a file."""
    if os.path.lexists(path) and not os.path.isfile(path):
        what = "a directory" if os.path.isdir(path) else "no regular file"
        raise GateError(f"{os.fspath(path)!r} is {what}, so nothing is written there; give the name of a file")
