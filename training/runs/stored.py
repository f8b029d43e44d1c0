"""What commands have written, read again: one reader for each kind of file, and one sentence for each that is damaged."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from gates.errors import GateError, first_line
from gates.files import replacing

# Checksums of what a run or a comparison has written, by which a reader tells a table that was written so from one of which a
# digit has changed since.
#
# They are those of texts, so that line ends of another system change nothing. Checkpoints, experiments and exports have
# their own.

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


T = TypeVar("T")

AGAIN = "start the command that wrote it again"
TEXTS = re.compile(
    r"stage|method|rival|other|kind|site|experiment|program|price|search|baseline|system|state|error|label|lever|metric|each"
    r"|\w+_interval"
)
"""Columns of our tables that hold texts; all others hold numbers, or true and false."""
WHOLE = ("seed", "budget", "heads", "step", "layer", "head", "gate", "seeds", "open")
"""Columns that hold whole numbers, in every row."""


def read_text(path: Path, *, mend: str = AGAIN) -> str:
    """The text of a file.

    Args:
        path: of the file.
        mend: what to do if it is damaged.

    Raises:
        FileNotFoundError: if there is none.
        GateError: if it is damaged, or has changed since it was written.
    """
    text = _text_of(path, mend)
    check_unchanged(path, text)
    return text


def _text_of(path: Path, mend: str) -> str:
    """The text of a file that nobody has looked at yet: what is wrong with it says more than that its checksum is another."""
    try:
        if stat.S_ISFIFO(mode := path.stat().st_mode) or stat.S_ISCHR(mode):  # which might never end
            raise damaged(path, "text", "it is no regular file", mend)
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, "text", first_line(error), mend) from error


def read_json(path: Path, kind: type[T], *, mend: str = AGAIN) -> T:
    """The content of a JSON file.

    Args:
        path: of the file.
        kind: of its content: ``dict``, ``list``, or ``object`` for any.
        mend: what to do if it is damaged.

    Raises:
        FileNotFoundError: if there is none.
        GateError: if it is damaged, or holds something else.
    """
    text = _text_of(path, mend)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "JSON", first_line(error), mend) from error
    if not isinstance(content, kind):
        raise damaged(path, f"a JSON {kind.__name__}", f"it holds a {type(content).__name__}", mend)
    check_unchanged(path, text)
    return content


def read_table(path: Path, *, needed: Collection[str] = (), mend: str = AGAIN) -> pd.DataFrame:
    """One of our tables, whose numbers are numbers.

    Args:
        path: of the file.
        needed: columns that it must have.
        mend: what to do if it is damaged.

    Raises:
        FileNotFoundError: if there is none.
        GateError: if it is damaged: cut off, without a column, or with a text where a number is expected.
    """
    text = _text_of(path, mend)
    if text and not text.endswith("\n"):
        raise damaged(path, "a whole table", "its last line is cut off", mend)
    table = parsed_table(path, text, needed=needed, mend=mend)
    check_unchanged(path, text)
    return table


def parsed_table(path: Path, text: str, *, needed: Collection[str], mend: str) -> pd.DataFrame:
    """The same of a file whose text has been read; a line without anything is an empty table."""
    if not text and needed:
        raise damaged(path, "a table", "it is empty", mend)
    if not text.strip():
        return pd.DataFrame()
    try:
        table = pd.read_csv(io.StringIO(text))
    except ValueError as error:  # pandas' own are ones too
        raise damaged(path, "a table", first_line(error), mend) from error
    if lacking := sorted(set(needed) - set(table.columns)):
        raise damaged(path, "this table", f"it has no column {', '.join(map(repr, lacking))}", mend)
    for name, column in table.items():
        check_numbers(path, str(name), column, mend)
    return table


def check_numbers(path: Path, name: str, column: pd.Series[Any], mend: str) -> None:
    """Raises :class:`GateError` for the first value of a column that is none of its kind."""
    if TEXTS.fullmatch(name):
        return
    numbers = column if is_numeric_dtype(column) else pd.to_numeric(column, errors="coerce")
    wrong = numbers.isna() & column.notna()
    if name in WHOLE:
        wrong |= ~np.isfinite(numbers.astype(float)) | (numbers.astype(float) % 1 != 0)
    if wrong.any():
        line = int(wrong.to_numpy().argmax())
        value = column.iloc[line]
        kind = "a whole number" if name in WHOLE else "a number"
        said = "nothing" if pd.isna(value) else repr(str(value)[:40])
        raise damaged(path, "this table", f"line {line + 2} has {said} in the column {name!r}, where {kind} is expected", mend)


def read_arrays(path: Path, *, mend: str = AGAIN) -> dict[str, np.ndarray]:
    """The arrays of an ``npz`` file by name; no pickled objects.

    Raises:
        GateError: if it is missing or damaged.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except PermissionError:
        raise
    except Exception as error:  # those of zip files, of compression, of headers, and of types that cannot be
        raise damaged(path, "arrays", first_line(error), mend) from error


def damaged(path: Path, kind: str, reason: str, mend: str) -> GateError:
    """The one sentence."""
    return GateError(f"cannot read {str(path)!r} as {kind}: it is damaged ({reason.rstrip('.')}); {mend}")
