"""How large a table is that a file holds, found out without reading it as one."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet

from gates.errors import GateError

MOST_COLUMNS = 1000
UNPACKED, RATIO = 64_000_000, 200
"""Bytes that a packed file may hold in any case, and how many times its own size; text is packed to a third or a tenth."""
LIKE_KEYS = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
"""All keys of JSON text, and perhaps more: those within values, and what is quoted in a text."""
ROWS_AT_ONCE = 1024


def count_keys(path: Path) -> int:
    """Columns of a jsonl file, which are the keys of all its lines together; counted no further than beyond all limits."""
    found: set[bytes] = set()
    before: list[bytes] = []
    for line in _lines(path):
        if (keys := LIKE_KEYS.findall(line)) != before:
            before = keys
            found.update(keys)
        if len(found) > MOST_COLUMNS:
            return _count_exactly(path)
    return len(found)


def _count_exactly(path: Path) -> int:
    keys: set[str] = set()
    for line in _lines(path):
        content = json.loads(line) if line.strip() else {}
        keys |= content.keys() if isinstance(content, dict) else set()
        if len(keys) > MOST_COLUMNS:
            break
    return len(keys)


def _lines(path: Path) -> Iterator[bytes]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        yield from stream


def check_unpacked(path: Path) -> None:
    """Raises :class:`GateError` for a parquet file whose table takes many times its size, as one does whose columns hold one
    value a million times; not all of it is read."""
    most, size = max(UNPACKED, RATIO * path.stat().st_size), 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            size += batch.nbytes
            if size > most:
                name = f"the data file {str(path)!r}"
                raise GateError(f"{name} unpacks to more than {RATIO} times its size, as no text does; check what it is")
