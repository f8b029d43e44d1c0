"""Scores of a dense model on disk, so that no pass over the data is made twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from gates.files import replacing
from training.runs import processes


class ScoreFiles(MutableMapping[str, Tensor]):
    """Scores ``[gates]`` by name, each in a JSON file of its own. Of several processes the first reads and writes.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, name: str) -> Tensor:
        found = processes.in_first(lambda: self._read(name))
        if found is None:
            raise KeyError(name)
        return torch.tensor(found, dtype=torch.float64)

    def _read(self, name: str) -> list[float] | None:
        try:
            scores: list[float] = json.loads(self._file(name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return scores

    def __setitem__(self, name: str, scores: Tensor) -> None:
        def write() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._file(name)) as partial:
                partial.write_text(json.dumps(scores.tolist()), encoding="utf-8")

        processes.in_first(write)

    def __delitem__(self, name: str) -> None:
        processes.in_first(self._file(name).unlink)

    def __iter__(self) -> Iterator[str]:
        return iter(processes.in_first(lambda: [file.stem for file in sorted(self.folder.glob("*.json"))]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"
