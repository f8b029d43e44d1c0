"""Checksums of what a run or a comparison has written, by which a reader tells a table that was written so from one of which a
digit has changed since.

They are those of texts, so that line ends of another system change nothing. Checkpoints, experiments and exports have
their own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gates.errors import GateError, first_line
from gates.files import replacing

CHECKSUMS = "checksums.json"
FOLDERS = ("", "masks", "translations")
ENDINGS = (".csv", ".tsv", ".json", ".md", ".yaml")
NOT_RESULTS = (CHECKSUMS, "finished.json", "hparams.yaml", "metrics-before-resuming.csv")
"""Files of which nobody reads a result."""


def write_checksums(folder: Path) -> None:
    """State what the tables, masks and texts in a directory are, once they are complete."""
    _write(folder, {path.relative_to(folder).as_posix(): _of(path.read_text(encoding="utf-8")) for path in _files(folder)})


def remove_checksums(folder: Path) -> None:
    """Take back what was stated, before something changes."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def check_unchanged(path: Path, text: str) -> None:
    """Whether a file still is what was written.

    Args:
        path: of the file, in the directory of a run or comparison or in one of its folders.
        text: that was read from it.

    Raises:
        GateError: if it is another text, or the checksums themselves are damaged.
    """
    for folder in path.absolute().parents[:2]:
        file = folder / CHECKSUMS
        stated = _stated(file).get(path.absolute().relative_to(folder).as_posix()) if os.path.lexists(file) else None
        if stated is not None and stated != _of(text):
            raise GateError(
                f"{str(path)!r} has changed since it was written (its checksum is another); start the command that wrote it "
                f"again, or, if the change is meant, delete {str(file)!r}"
            )


def _write(folder: Path, sums: Mapping[str, str]) -> None:
    with replacing(folder / CHECKSUMS) as partial:
        partial.write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def _stated(file: Path) -> dict[str, str]:
    try:
        if not file.is_file():  # a pipe might never end
            raise ValueError("it is no regular file")
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except PermissionError:  # which is no damage
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise GateError(
            f"cannot read {str(file)!r} as checksums: it is damaged ({first_line(error).rstrip('.')}); delete it to read the "
            "tables beside it as they are"
        ) from error
    return content


def _files(folder: Path) -> Iterator[Path]:
    for part in FOLDERS:
        for path in sorted((folder / part).glob("*")):
            if path.is_file() and path.suffix in ENDINGS and path.name not in NOT_RESULTS and not path.name.startswith("."):
                yield path


def _of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
