"""Whether a run has ended with everything that it was asked for, so that there is nothing to resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from gates.errors import GateError
from training.config.yaml_text import read_yaml
from training.runs.run_directory import CONFIG, EARLIER_LOG, RunDirectory
from training.runs.stored import read_json

FINISHED = "finished.json"
"""Written last of all, with the names of the files that the run has left."""
ELSEWHERE = ("experiments", "wandb")
"""Folders that nobody needs any more, and whose files go."""
AT_THE_END = ("compare", "retrained", "from_scratch", "from_scratch_epochs", "from_scratch_learning_rate", "curve")
"""Options that say what a run is compared with, which may be others when it is resumed."""


def mark_finished(run: RunDirectory) -> None:
    """State that the run has ended."""
    run.write_json(FINISHED, {"files": sorted(_files(run.path))})


def is_finished(run: RunDirectory, resolved: str) -> bool:
    """Whether the run has ended, all its files are there, and this command asks for nothing else.

    Args:
        run: that is resumed, with the options that it began with.
        resolved: the configuration of this command, as YAML.
    """
    try:
        files = [run.path / str(file) for file in read_json(run.path / FINISHED, dict)["files"]]
        began = read_yaml(run.path / CONFIG, "the configuration")
    except (GateError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # then the end of the run is made anew
        return False
    asked = yaml.safe_load(resolved)
    return all(began.get(name) == asked.get(name) for name in AT_THE_END) and all(file.is_file() for file in files)


def unmark_finished(run: RunDirectory) -> None:
    """State that there is something to do again."""
    (run.path / FINISHED).unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[str]:
    """Files in a run directory that are results, relative to it."""
    for path in folder.rglob("*"):
        within = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in within.parts)
        if path.is_file() and not hidden and within.parts[0] not in (*ELSEWHERE, FINISHED, EARLIER_LOG):
            yield str(within)
