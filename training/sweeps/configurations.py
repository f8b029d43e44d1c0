"""The configurations that the trials of a sweep read, so that a sweep goes on with what it began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gates.errors import GateError
from training.cli.command_line import shipped
from training.runs.hashing import file_fingerprint
from training.sweeps.space import Sweep

CONFIGURATIONS = "configurations"
"""In the note of a sweep, fingerprints of these files by their names."""


def fingerprints(sweep: Sweep, further: Sequence[str]) -> dict[str, str]:
    """Of every configuration that the trials name.

    Args:
        sweep: whose trials take every option.
        further: their further arguments.
    """
    names: dict[str, None] = {}
    for _, command in sweep.extremes(further):
        for option, value in zip(command, [*command[1:], ""], strict=True):
            if option == "--config":
                names[value] = None
            elif option.startswith("--config="):
                names[option.partition("=")[2]] = None
    files = {name: Path(shipped(name)) for name in names}
    return {name: file_fingerprint(file) for name, file in files.items() if file.is_file()}


def refuse_changed(directory: Path, noted: object, found: Mapping[str, str]) -> NoReturn:
    """Raises :class:`GateError` for configurations that are not those of a sweep.

    Args:
        directory: of the sweep.
        noted: what it has noted.
        found: what it would note now.
    """
    mend = "so that its next trials would be of other options; bring back what it was, or give another --run_dir"
    if not isinstance(noted, dict):
        raise GateError(
            f"the sweep in {str(directory)!r} was begun by an earlier version, which did not note what configurations hold; "
            "give another --run_dir"
        )
    name = next(name for name in [*found, *noted] if found.get(name) != noted.get(name))
    raise GateError(f"the configuration {name!r} has changed since the sweep in {str(directory)!r} began, {mend}")
