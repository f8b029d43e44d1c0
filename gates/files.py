"""Files and folders that are complete or not there, also after a process is killed or the power is cut.

What is being written lies beside its place as ``.NAME.partial-PROCESS``. It is brought to the disk before it takes its name.
What a process that was killed has left is removed when the same name is written again. A disk that takes no more is told as an
``OSError`` that names the file, whatever library found out and whatever it said.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gates.errors import GateError

PARTIAL = re.compile(r"\..+\.partial-(?P<process>\d+)")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a system says where there is no more room: on the disk, for this user, in a file of this size."""
TAKES_NOTHING = (*FULL, errno.EROFS, errno.EIO)
"""And where a disk takes nothing for other reasons."""
IN_WORDS = (
    (re.compile(r"\(os error (?P<number>\d+)\)"), None),  # Rust's: safetensors, tokenizers
    (re.compile(r"No space left on device"), errno.ENOSPC),
    (re.compile(r"database or disk is full"), errno.ENOSPC),  # SQLite's
)
"""How libraries say it that raise errors of their own."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary name beside ``path``, which the file leaves for its own when the block succeeds. Of a symbolic link, the file
    that it leads to is replaced.

    Raises:
        GateError: if there is something else than a file, such as a device.
    """
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
    """A disk that takes no more in the ``with`` block as an error that names ``path``, or what lies in it.

    Raises:
        OSError: with the number that the system gave, its words and a file's own name, which nobody sees under any other.
    """
    try:
        yield
    except GateError:  # says what is wrong better
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
    """The system's number for a disk that takes no more, if that is behind an error; None if something else is."""
    seen: set[int] = set()
    reason: BaseException | None = error
    while reason is not None and id(reason) not in seen:
        seen.add(id(reason))
        number = reason.errno if isinstance(reason, OSError) else None
        for words, stated in IN_WORDS if number is None else ():
            if (said := words.search(str(reason))) is not None:
                number = stated or int(said["number"])
        if number in TAKES_NOTHING:
            return number
        reason = reason.__cause__ or reason.__context__
    return None


@contextmanager
def written_whole(directory: Path) -> Iterator[Path]:
    """A temporary directory beside ``directory`` that takes its name on success and vanishes on failure. A link stays, and
    the empty folder that it leads to is filled."""
    directory = Path(os.path.realpath(directory))
    remove_left_behind(directory)
    partial = partial_of(directory)
    remove(partial)
    try:
        with naming(directory):
            partial.mkdir(parents=True)
            yield partial
            bring_all_to_disk(partial)
            if directory.exists():
                directory.rmdir()
            partial.rename(directory)
            bring_to_disk(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_of(path: Path) -> Path:
    """Where this process writes what is to become ``path``."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def is_partial(path: Path) -> bool:
    """Whether this is the name of something that is being written, or that a process which was killed has left."""
    return PARTIAL.fullmatch(path.name) is not None


def remove_left_behind(path: Path) -> None:
    """Remove what processes that are gone have left beside ``path``, which they were writing."""
    for left in path.parent.glob(f".{_literal(path.name)}.partial-*"):
        named = PARTIAL.fullmatch(left.name)
        if named is not None and _is_gone(int(named["process"])):
            remove(left)


def remove(path: Path) -> None:
    """Remove a file or a folder with what is in it, if it is there; of a link the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bring_all_to_disk(folder: Path) -> None:
    """Wait until a folder and all that is in it are on the disk."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            bring_to_disk(path)
    bring_to_disk(folder)


def bring_to_disk(path: Path) -> None:
    """Wait until a file, or what a folder says of its files' names, is on the disk. Some systems notice only then that there is
    no room."""
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
    """A name as a pattern of ``glob``."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _is_gone(process: int) -> bool:
    """Whether there is no such process on this machine."""
    if os.name == "nt":  # where asking would end it
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's
        return False
    return False


def refuse_other_than_file(path: str | os.PathLike[str]) -> None:
    """Raises :class:`GateError` for a path where no file can be written, since something else is there."""
    if os.path.lexists(path) and not os.path.isfile(path):
        what = "a directory" if os.path.isdir(path) else "no regular file"
        raise GateError(f"{os.fspath(path)!r} is {what}, so nothing is written there; give the name of a file")
