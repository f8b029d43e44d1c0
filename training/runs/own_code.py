"""A user's own code: found from the working directory, and known by its files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import xxhash


def import_from_here() -> None:
    """From now on modules in the working directory can be imported, as under ``python -m``."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def code_fingerprint(modules: Iterable[str]) -> str:
    """A hash of the files of some modules that are imported, by their names; what they import in turn is not part of it."""
    digest = xxhash.xxh3_128()
    for name in dict.fromkeys(modules):
        file = getattr(sys.modules.get(name), "__file__", None)  # those of Python itself have none
        digest.update(f"{name} ".encode() + (Path(file).read_bytes() if file else b""))
    return digest.hexdigest()
