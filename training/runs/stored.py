"""Readers of the files that commands write: a damaged file is one sentence that names it."""

from __future__ import annotations

import hashlib
import io
import json
import stat
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from gates.errors import GateError, first_line
from gates.files import replacing

# Checksums of the tables, masks and texts of a run or a comparison show that a digit has changed. They are those of texts, so
# that line ends of another system change nothing. Checkpoints, experiments and exports have their own.

CHECKSUMS = "checksums.json"
FOLDERS = ("", "masks", "translations")
ENDINGS = (".csv", ".tsv", ".json", ".md", ".yaml")
NOT_RESULTS = (CHECKSUMS, "finished.json", "hparams.yaml", "metrics-before-resuming.csv")


def write_checksums(folder: Path) -> None:
    """Write the checksums of the tables, masks and texts in a directory, once they are complete."""
    files = [path for part in FOLDERS for path in sorted((folder / part).glob("[!.]*")) if path.is_file()]
    sums = {
        path.relative_to(folder).as_posix(): _checksum(path.read_text(encoding="utf-8"))
        for path in files
        if path.suffix in ENDINGS and path.name not in NOT_RESULTS
    }
    with replacing(folder / CHECKSUMS) as partial:
        partial.write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")


def remove_checksums(folder: Path) -> None:
    """Remove the checksums before a file changes."""
    (folder / CHECKSUMS).unlink(missing_ok=True)


def check_unchanged(path: Path, text: str) -> None:
    """Raise :class:`GateError` if a file has changed since it was written, or the checksums are damaged."""
    for folder in path.absolute().parents[:2]:
        file = folder / CHECKSUMS
        if not file.exists():
            continue
        mend = "delete it to read the tables there as they are"
        sums = _parsed(file, _text_of(file, mend), dict, "checksums", mend)
        if sums.get(path.absolute().relative_to(folder).as_posix(), own := _checksum(text)) != own:
            raise GateError(
                f"{str(path)!r} has changed since it was written (its checksum is another); start the command that wrote it "
                f"again, or, if the change is meant, delete {str(file)!r}"
            )


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


T = TypeVar("T")

RUN_AGAIN = "start the command that wrote it again"


def read_text(path: Path, *, mend: str = RUN_AGAIN) -> str:
    """Return the text of a file.

    Raises:
        FileNotFoundError: If there is none.
        GateError: If it is damaged, or has changed since it was written.
    """
    text = _text_of(path, mend)
    check_unchanged(path, text)
    return text


def read_json(path: Path, kind: type[T], *, mend: str = RUN_AGAIN) -> T:
    """Return the content of a JSON file; see :func:`read_text`.

    Args:
        kind: The type of its content: ``dict``, ``list``, or ``object`` for any.
    """
    text = _text_of(path, mend)
    content = _parsed(path, text, kind, "JSON", mend)
    check_unchanged(path, text)
    return content


def read_table(path: Path, *, needed: Collection[str] = (), mend: str = RUN_AGAIN) -> pd.DataFrame:
    """Return a table with the needed columns; see :func:`read_text`."""
    text = _text_of(path, mend)
    if text and not text.endswith("\n"):
        raise damaged(path, "a whole table", "its last line is cut off", mend)
    table = parsed_table(path, text, needed=needed, mend=mend)
    check_unchanged(path, text)  # last, because the place of damage says more than another checksum
    return table


def _text_of(path: Path, mend: str) -> str:
    try:
        if stat.S_ISFIFO(mode := path.stat().st_mode) or stat.S_ISCHR(mode):
            raise damaged(path, "text", "it is no regular file", mend)  # reading it might never end
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, "text", first_line(error), mend) from error


def _parsed(path: Path, text: str, kind: type[T], what: str, mend: str) -> T:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, what, first_line(error), mend) from error
    if not isinstance(content, kind):
        raise damaged(path, f"a JSON {kind.__name__}", f"it holds a {type(content).__name__}", mend)
    return content


def parsed_table(path: Path, text: str, *, needed: Collection[str], mend: str) -> pd.DataFrame:
    """Return the table in a text. A blank line is an empty table."""
    if not text and needed:
        raise damaged(path, "a table", "it is empty", mend)
    if not text.strip():
        return pd.DataFrame()
    try:
        table = pd.read_csv(io.StringIO(text))
    except ValueError as error:  # pandas' own errors are ValueErrors too
        raise damaged(path, "a table", first_line(error), mend) from error
    if lacking := sorted(set(needed) - set(table.columns)):
        raise damaged(path, "this table", f"it has no column {', '.join(map(repr, lacking))}", mend)
    return table


def read_arrays(path: Path, *, mend: str = RUN_AGAIN) -> dict[str, np.ndarray]:
    """Return the arrays of an ``npz`` file by name. Pickled objects are refused."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except PermissionError:
        raise
    except Exception as error:  # of zip files, compression, headers and types
        raise damaged(path, "arrays", first_line(error), mend) from error


def damaged(path: Path, kind: str, reason: str, mend: str) -> GateError:
    return GateError(f"cannot read {str(path)!r} as {kind}: it is damaged ({reason.rstrip('.')}); {mend}")
