"""Hashes by which data are known again: of encoded columns, whatever the widths of their integers and however they lie in
memory; of files; of folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset

ROWS = 10_000
"""Hashed at once."""
PROBES, PROBE = 1024, 65_536
"""Places of a file that are looked at to know it again, and bytes at each; a file of at most as many is read whole."""


def add_column(digest: xxhash.xxh3_128, split: Dataset, name: str) -> None:
    """Let a hash depend on all values of a column, in order: integers, lists of integers, or anything that JSON can hold."""
    column = split.select_columns(name).with_format("arrow")
    digest.update(f"{name} {column.num_rows} ".encode())
    for first in range(0, column.num_rows, ROWS):
        values = column[first : first + ROWS].column(0)
        if pa.types.is_list(values.type) and pa.types.is_integer(values.type.value_type) and not values.null_count:
            digest.update(_bytes(pc.list_value_length(values)))
            values = pc.list_flatten(values)
        if pa.types.is_integer(values.type) and not values.null_count:
            digest.update(_bytes(values))
        else:
            digest.update(json.dumps(values.to_pylist()).encode())


def _bytes(integers: pa.ChunkedArray) -> bytes:
    return integers.to_numpy().astype(np.int64).tobytes()


def probed(file: str) -> str:
    """A hash of a file's size and of what it holds: all of it, or at places all over one that is large."""
    size = os.path.getsize(file)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(file, "rb") as stream:
        if size <= PROBES * PROBE:
            while part := stream.read(PROBE):
                digest.update(part)
        else:
            for place in range(PROBES):
                stream.seek((size - PROBE) * place // (PROBES - 1))
                digest.update(stream.read(PROBE))
    return digest.hexdigest()


def cache_of(dataset: str) -> str | None:
    """The place for what ``datasets`` prepares of a data set; None for its usual one.

    Of a folder with a card (``README.md``) it knows neither where it lies nor when it changed, and would take what it prepared
    of another one for this.

    Args:
        dataset: hub name or folder.
    """
    folder = Path(dataset)
    if not (folder / "README.md").is_file():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stated = [(path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = xxhash.xxh3_64(json.dumps([str(folder.resolve()), stated]).encode()).hexdigest()
    return os.path.join(datasets.config.HF_DATASETS_CACHE, f"folder-{digest}")
