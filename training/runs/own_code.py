"""Code that results depend on: a user's own, found from the working directory, and this project's, known by their files."""

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


def folders_fingerprint(*folders: Path) -> str:
    """A hash of all Python modules in some folders, by their places there and whatever folders they lie in."""
    digest = xxhash.xxh3_128()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            digest.update(f"{folder.name}/{file.relative_to(folder).as_posix()} ".encode() + file.read_bytes())
    return digest.hexdigest()
