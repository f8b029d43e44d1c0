"""Short hashes that tell whether weights, files or JSON content are the same."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from datasets import Dataset


def weights_fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of all parameters and buffers, names and values."""
    digest = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """Return a hash of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def key_of(determined_by: Mapping[str, Any]) -> str:
    """Return a short hash of JSON content, which does not depend on the order of its fields."""
    text = json.dumps(determined_by, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checkpoint_fingerprint(path: Path) -> str:
    """Return a hash of a checkpoint by the CRC-32 checksums of its parts, so that little is read. Whether the parts have these
    checksums is checked by :func:`training.pruner.checkpoints.check_whole`."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = sorted((part.filename, part.file_size, part.CRC) for part in archive.infolist())
    except PermissionError:
        raise
    except Exception:  # it is no archive
        return file_fingerprint(path)
    return xxhash.xxh3_128(json.dumps(parts).encode()).hexdigest()


ROWS = 10_000
"""Rows that are hashed at once."""
PROBES, PROBE = 1024, 65_536
"""The number of places of a large file that are hashed, and the bytes at each."""


def add_column(digest: xxhash.xxh3_128, split: Dataset, name: str) -> None:
    """Add all values of a column to a hash, in order. The hash does not depend on the width of integers or the memory layout.

    Args:
        name: The column: integers, lists of integers, or anything that JSON can hold.
    """
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
    """Return a hash of a file's size and content, or of places all over a large file."""
    size = os.path.getsize(file)
    digest = xxhash.xxh3_128(str(size).encode())
    with open(file, "rb") as stream:
        if size <= PROBES * PROBE:
            digest.update(stream.read())
        else:
            for place in range(PROBES):
                stream.seek((size - PROBE) * place // (PROBES - 1))
                digest.update(stream.read(PROBE))
    return digest.hexdigest()


def cache_of(dataset: str) -> str | None:
    """Return the cache of ``datasets`` for a dataset, or None for the default one.

    A folder with a card (``README.md``) gets a cache of its own: ``datasets`` notices neither its place nor its changes.
    """
    folder = Path(dataset)
    if not (folder / "README.md").is_file():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    stated = [(path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = xxhash.xxh3_64(json.dumps([str(folder.resolve()), stated]).encode()).hexdigest()
    return os.path.join(datasets.config.HF_DATASETS_CACHE, f"folder-{digest}")
