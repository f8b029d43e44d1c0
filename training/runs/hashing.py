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
    """A hash of all parameters and buffers, names and values."""
    digest = xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """A hash of a file's content."""
    with path.open("rb") as file:
        digest = xxhash.xxh3_128()
        while part := file.read(2**24):
            digest.update(part)
        return digest.hexdigest()


def key_of(determined_by: Mapping[str, Any]) -> str:
    """A short hash of JSON content; equal content has equal keys, whatever the order of its fields."""
    text = json.dumps(determined_by, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def checkpoint_fingerprint(path: Path) -> str:
    """A hash of what a checkpoint's parts are, by the checksums (CRC-32) that it has of them, so that little is read. Whether
    the parts have these checksums is told by :func:`training.pruner.checkpoints.check_whole`."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = sorted((part.filename, part.file_size, part.CRC) for part in archive.infolist())
    except PermissionError:
        raise
    except Exception:  # which is no archive
        return file_fingerprint(path)
    return xxhash.xxh3_128(json.dumps(parts).encode()).hexdigest()


# Hashes by which data are known again: of encoded columns, whatever the widths of their integers and however they lie in
# memory; of files; of folders.

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
