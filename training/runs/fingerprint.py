"""Short hashes that tell whether weights or files are the same."""

from __future__ import annotations

from pathlib import Path

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
