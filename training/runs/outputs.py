"""Files that a command writes because it was told their names."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from gates.errors import GateError
from gates.files import is_partial, refuse_other_than_file

LOOKED_AT = 4096
"""Bytes of a file by which it is known."""


def check_output_folder(folder: str | os.PathLike[str], names: Collection[str]) -> None:
    """Whether a command may write these files into its ``--output``, which may hold nothing but earlier ones of them.

    Args:
        folder: where to.
        names: of the files.

    Raises:
        GateError: if it is no folder, or holds something else.
    """
    if not os.path.lexists(folder):
        return
    if not os.path.isdir(folder):
        raise GateError(f"--output {os.fspath(folder)!r} is no folder, so nothing is written there; give another name")
    for name in sorted(os.listdir(folder)):
        if name not in names and not is_partial(Path(name)):
            raise GateError(
                f"--output {os.fspath(folder)!r} holds {name!r}, which this command does not write; give a folder of its own"
            )
        refuse_other_than_file(os.path.join(folder, name))


def check_new_output(path: str | os.PathLike[str], mark: str, what: str) -> None:
    """Whether a command that makes no folders may write its ``--output``.

    Args:
        path, mark, what: see :func:`check_output`.

    Raises:
        GateError: if its folder does not exist or is read-only, or for what :func:`check_output` refuses.
    """
    if not (parent := Path(path).resolve().parent).is_dir() or not os.access(parent, os.W_OK):
        raise GateError(f"cannot write {os.fspath(path)!r}: its folder does not exist or is read-only; give another file")
    check_output(path, mark, what)


def check_output(path: str | os.PathLike[str], mark: str, what: str) -> None:
    """Whether a command may write its ``--output``.

    Args:
        path: where to.
        mark: what stands near the beginning of every such file.
        what: such a file is called.

    Raises:
        GateError: if there is something else than an earlier file of this command, or an empty one.
    """
    path = os.path.realpath(path)
    refuse_other_than_file(path)
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        beginning = file.read(LOOKED_AT)
    if beginning.strip() not in (b"", b"[]") and mark.encode() not in beginning:
        raise GateError(f"--output {path!r} is there and is no {what}, so it is not replaced; give another name, or remove it")
