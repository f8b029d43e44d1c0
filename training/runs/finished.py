"""Whether a run has ended with everything that it was asked for, so that there is nothing to resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from training.runs.run_directory import CONFIG, EARLIER_LOG, RunDirectory

FINISHED = "finished.json"
"""Written last of all, with the names of the files that the run has left."""
ELSEWHERE = ("experiments", "wandb")
"""Folders that nobody needs any more, and whose files go."""
AT_THE_END = ("compare", "retrained", "from_scratch", "curve")
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
        files = json.loads((run.path / FINISHED).read_text(encoding="utf-8"))["files"]
        began = yaml.safe_load((run.path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False
    asked = yaml.safe_load(resolved)
    return all(began.get(name) == asked.get(name) for name in AT_THE_END) and all((run.path / file).is_file() for file in files)


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
