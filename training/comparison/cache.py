"""Results on disk under a hash of what determines them, so that interrupted work goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from gates.errors import GateError

DETERMINED_BY, RESULT = "cell.json", "result.json"


def key_of(determined_by: Mapping[str, Any]) -> str:
    """A short hash of JSON content; equal content has equal keys, whatever the order of its fields."""
    text = json.dumps(determined_by, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """A finished piece of work.

    Args:
        key: hash of what determines it.
        path: its folder, with whatever files it left.
        result: content of its ``result.json``.
    """

    key: str
    path: Path
    result: dict[str, Any]


class CellCache:
    """Finished cells in ``path/KEY``; cells under way in ``path/.KEY``, which become finished ones by a rename.

    Work that is killed leaves its folder under way behind, and finds its files (a checkpoint to go on from) there again.
    Of several processes that need the same cell one makes it, and the others wait; the lock ends with its process.

    Args:
        path: of the cache.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, determined_by: Mapping[str, Any]) -> Cell | None:
        """The finished cell, None if there is none.

        Raises:
            GateError: if its result is damaged.
        """
        key = key_of(determined_by)
        folder = self.path / key
        if not folder.is_dir():
            return None
        try:
            result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise GateError(f"the cached result in {str(folder)!r} is damaged; delete that folder and start again") from error
        return Cell(key, folder, result)

    def get_or_make(self, determined_by: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Cell:
        """The finished cell; if there is none, it is made.

        Args:
            determined_by: everything that the result depends on, as JSON.
            make: does the work in the folder it is given and returns the result, as JSON.
        """
        found = self.get(determined_by)
        if found is not None:
            return found
        lock = self.path / f".{key_of(determined_by)}.lock"
        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            cell = self.get(determined_by) or self._make(determined_by, make)  # another process may have made it meanwhile
            with suppress(OSError):  # Windows keeps open files
                lock.unlink()  # a finished cell needs none: whoever comes later finds it before working
        return cell

    def _make(self, determined_by: Mapping[str, Any], make: Callable[[Path], dict[str, Any]]) -> Cell:
        key = key_of(determined_by)
        working = self.path / f".{key}"
        working.mkdir(exist_ok=True)
        (working / DETERMINED_BY).write_text(json.dumps(determined_by, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        result = make(working)
        (working / RESULT).write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(working, self.path / key)
        return Cell(key, self.path / key, result)
