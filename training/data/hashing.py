"""Hashes of encoded columns, whatever the widths of their integers and however they lie in memory."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from datasets import Dataset

ROWS = 10_000
"""Hashed at once."""


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
