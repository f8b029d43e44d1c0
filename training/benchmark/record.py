"""What was measured in one run directory, with machine and versions: a file that grows by parts, so that a run that was stopped
goes on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import gates
from gates.errors import GateError
from gates.export.cost import hardware
from gates.files import replacing
from training.benchmark.parts import PARTS
from training.benchmark.setting import Setting
from training.runs.own_code import folders_fingerprint
from training.runs.stored import read_json

FILE = "benchmark.json"
PACKAGES = ("head-gates", "torch", "transformers", "onnxruntime")
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Record:
    """The content of ``benchmark.json``.

    Args:
        command: that measured, without folders of this machine.
        machine: ``hardware``, ``cores``, ``system``.
        versions: of Python and packages.
        setting: see :class:`training.benchmark.setting.Setting`.
        parts: rows by part.
        code: a hash of what is measured and of what measures, :func:`code`; empty where an earlier version wrote the file.
    """

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    setting: Mapping[str, Any]
    parts: Mapping[str, Rows] = field(default_factory=dict)
    code: str = ""

    @classmethod
    def of(cls, command: str, setting: Setting) -> Self:
        """One with nothing measured yet."""
        own = {**asdict(setting), "model": None if setting.model is None else Path(setting.model).name}
        own["sizes"] = [str(size) for size in setting.sizes]
        machine = {"hardware": hardware(setting.on), "cores": os.cpu_count(), "system": platform.system()}
        return cls(command, machine, {"python": platform.python_version()} | versions(), own, code=code())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises :class:`GateError` for a folder without one, or with one that is damaged."""
        try:
            content = read_json(folder / FILE, dict)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise GateError(
                f"{str(folder)!r} has no {FILE}; measure it with python -m training benchmark --run_dir {str(folder)!r}"
            ) from error
        try:
            record = cls(**content)
            needed = {"hardware", "cores"} - {*record.machine} | {"device", "model", "shape", "processor_time", "quick"} - {
                *record.setting
            }
            unknown = record.parts.keys() - PARTS.keys()
            if needed or unknown or not all(isinstance(row, dict) for rows in record.parts.values() for row in rows):
                raise KeyError(*needed, *unknown)
        except (AttributeError, KeyError, TypeError) as error:
            raise GateError(
                f"{FILE} in {str(folder)!r} is not as this command writes it; measure into another folder"
            ) from error
        return record

    @property
    def device(self) -> str:
        return str(self.setting["device"])

    def check_goes_on(self, other: Record, folder: Path) -> None:
        """Raises :class:`GateError` where the parts of another record would stand beside these and not be of one thing."""
        for name in ("setting", "machine", "versions"):
            own, others = getattr(self, name), getattr(other, name)
            different = [key for key in {**own, **others} if own.get(key) != others.get(key)]
            if different:
                key = different[0]
                raise _other(folder, key, own.get(key), others.get(key))
        if self.code != other.code:
            raise _other(folder, "code", self.code, other.code)

    def write(self, folder: Path) -> None:
        with replacing(folder / FILE) as partial:
            partial.write_text(json.dumps(asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _other(folder: Path, what: str, then: Any, now: Any) -> GateError:
    return GateError(
        f"{str(folder)!r} has parts that were measured with {what} {then!r}, and now it is {now!r}; give another --run_dir"
    )


def code() -> str:
    """A hash of the library and of this package, as they are installed or checked out."""
    return folders_fingerprint(Path(gates.__file__).parent, Path(__file__).parent)[:16]


def versions() -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
