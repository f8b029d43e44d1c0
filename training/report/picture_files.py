"""The pictures beside a page. Each says of itself that a report has drawn it, and no other file is replaced or removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gates.errors import GateError
from gates.files import is_partial, replacing
from training.runs.outputs import LOOKED_AT, check_output

MARK = "drawn by head-gates report"
"""Near the beginning of every picture."""


def write_pictures(pictures: Mapping[Path, bytes]) -> None:
    """Write pictures, all of them or, where one may not be written, none.

    Raises:
        GateError: if something else than an earlier picture has the name of one.
    """
    for path in pictures:
        check_output(path, MARK, "picture of a report")
    for path, content in pictures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_bytes(content)


def check_own_folder(folder: Path) -> None:
    """Whether a folder that a command keeps for its pictures holds nothing else.

    Raises:
        GateError: if it does, or leads elsewhere.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise GateError(f"{str(folder)!r} is no folder of its own for pictures; remove it, or give another --run_dir")
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not is_partial(path) and not _is_own(path):
            raise GateError(
                f"{str(path)!r} was not drawn by this version of this command, which keeps its pictures there; move it, or "
                "give another --run_dir"
            )


def remove_pictures(folder: Path) -> None:
    """Remove a folder's pictures that a report has drawn."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if _is_own(path):
            path.unlink()


def _is_own(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(LOOKED_AT)
