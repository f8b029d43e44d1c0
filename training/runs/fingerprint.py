"""Short hashes that tell whether weights, files or JSON content are the same."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash


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
