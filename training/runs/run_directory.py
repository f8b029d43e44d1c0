"""The run directory: where everything of a run is written, in a fixed shape.

::

    config.yaml        the resolved configuration
    metrics.json       results of the run, versions, machine
    metrics.csv        what was logged at each step
    comparison.csv     every method at the run's budget; with summary.csv, statistics.csv, agreement.csv, verdict.md
    curve.csv          post hoc quality of every ranking at other budgets (selection split)
    scores.csv         raw scores and rankings of every gate
    gates_over_time.csv, masks.json, sites.json, samples.tsv
    masks/*.json       the mask of each method
    plots/*.png        gate heat map, quality by budget, agreement of masks
    checkpoints/       dense.ckpt (end of fine-tuning), last.ckpt, final.ckpt
    experiments/       finished pieces of training and evaluation, see :mod:`training.comparison.cache`
    export/            the pruned model
    finished.json      written last of all, see :mod:`training.runs.finished`
    wandb/             W&B's own files
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from gates.errors import GateError, first_line
from gates.files import replacing
from training.config import Existing, RunOptions
from training.runs.progress import is_first_process

CONFIG = "config.yaml"
"""Makes a directory that of a run."""
UNFINISHED = "comparison.unfinished.csv"
"""Rows so far of a comparison. The tables of an earlier, shorter one stay as they are until the new ones are complete."""
FOLDERS = ("masks", "plots", "checkpoints")
FREE_WHEN_RESUMED = (
    "config", "run_dir", "existing", "name", "ckpt_path", "save_every", "compare", "retrained", "from_scratch", "curve",
    "wandb.", "data.init_args.num_workers", "trainer.enable_", "trainer.log_every_n_steps", "trainer.profiler",
    "trainer.default_root_dir",
)  # fmt: skip
"""Options that change no result that is there already."""
RUN_DIR_OF_FIRST = "HEAD_GATES_RUN_DIR"
"""Environment variable by which the first process tells those that Lightning starts where it writes."""
EARLIER_LOG = "metrics-before-resuming.csv"


def _is_partial(path: Path) -> bool:
    """Whether a process that was killed has left this in place of a whole file or folder."""
    return path.name.startswith(".") and ".partial-" in path.name


def _is_remains(path: Path) -> bool:
    """Whether all that this tells is that a run was stopped before it began."""
    return _is_partial(path) or (path.name in FOLDERS and path.is_dir() and not any(path.iterdir()))


def _read_log(path: Path) -> pd.DataFrame | None:
    """What was logged, but for a last line that was not written to its end; None if that is nothing."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    log = pd.read_csv(io.StringIO(whole)) if whole.strip() else pd.DataFrame()
    return log if len(log) else None


def _joined(logs: list[pd.DataFrame]) -> pd.DataFrame:
    """Logs one after another; steps that a later one has again are taken from it."""
    joined = logs[0]
    for log in logs[1:]:
        joined = pd.concat([joined[joined["step"] < log["step"].min()], log], ignore_index=True)
    return joined


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run.

    Args:
        path: the directory.
        resumes: whether it held a run that this one goes on with.
    """

    path: Path
    resumes: bool = False

    @classmethod
    def claim(cls, path: str | None, name: str, existing: Existing) -> RunDirectory:
        """Choose and check the directory; nothing is written yet.

        Args:
            path: as the user gave it; None stands for ``runs/NAME``, with a number if that is taken.
            name: of the run.
            existing: what to do when the directory holds a run.

        Raises:
            GateError: if it is taken, or there is nothing to resume.
        """
        chosen = Path("runs") / name if path is None else Path(path)
        if path is None and existing == "refuse":
            number = 2
            while chosen.exists():
                chosen = Path("runs") / f"{name}-{number}"
                number += 1
        for place in (chosen, *chosen.parents):
            if place.exists() and not place.is_dir():
                raise GateError(f"--run_dir {str(chosen)!r} is or lies in a file ({str(place)!r}); give a directory")
        taken = chosen.is_dir() and any(not _is_remains(path) for path in chosen.iterdir())
        holds_run = (chosen / CONFIG).is_file()
        if existing == "resume":
            if not holds_run:
                raise GateError(f"there is nothing to resume in {str(chosen)!r}: it does not hold a run; check --run_dir")
            return cls(chosen, resumes=True)
        if taken and not holds_run:
            raise GateError(
                f"{str(chosen)!r} is not empty and does not hold a run, so nothing is written there; give another --run_dir"
            )
        if taken and existing == "refuse":
            raise GateError(
                f"{str(chosen)!r} already holds a run; go on with it (--existing resume), replace it (--existing overwrite) "
                "or give another --run_dir"
            )
        return cls(chosen)

    @classmethod
    def of_other_process(cls, path: str | None, name: str, existing: Existing) -> RunDirectory:
        """The directory that the first of several processes has claimed."""
        return cls(Path("runs") / name if path is None else Path(path), resumes=existing == "resume")

    @classmethod
    def finished(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """A run that has ended.

        Raises:
            GateError: if there is no such directory, it does not hold a run, or the run has not ended.
        """
        found = cls(Path(path))
        if not found.path.is_dir():
            raise GateError(f"the run {str(path)!r} does not exist; give a run directory, or a checkpoint in one")
        if not (found.path / CONFIG).is_file():
            raise GateError(f"{str(path)!r} does not hold a run: it has no config.yaml; give a directory that fit wrote")
        for part in (found.path / "metrics.json", found.checkpoint("final"), found.export / "config.json"):
            if not part.is_file():
                raise GateError(
                    f"the run in {str(path)!r} has not ended: it has no {part.relative_to(found.path)}; go on with it "
                    "(python -m training.fit --existing resume)"
                )
        return found

    def create(self, config_yaml: str) -> None:
        """Make the folders (an old run is removed unless it is resumed) and save the resolved configuration, which says from
        then on that the directory holds this run. Until then, what is left of an old one is told by its own."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in list(self.path.iterdir()):
            if (path.name != CONFIG and not self.resumes) or _is_partial(path):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for folder in FOLDERS:
            (self.path / folder).mkdir(exist_ok=True)
        if self.resumes:
            self._keep_log()
        self.write_text(CONFIG, config_yaml)

    def holds(self, config_yaml: str) -> bool:
        """Whether the directory holds a run of this resolved configuration, which can be resumed."""
        file = self.path / CONFIG
        return self.resumes or (file.is_file() and file.read_text(encoding="utf-8") == config_yaml)

    def _keep_log(self) -> None:
        """Set the log of the interrupted run aside, since the logger starts a new file."""
        logs = [log for name in (EARLIER_LOG, "metrics.csv") if (log := _read_log(self.path / name)) is not None]
        if logs:
            self.write_table(EARLIER_LOG, _joined(logs))

    def join_logs(self) -> None:
        """Put the log of an interrupted run and that of its resumption together, in ``metrics.csv``."""
        earlier, own = self.path / EARLIER_LOG, self.path / "metrics.csv"
        if earlier.is_file():
            logs = [log for path in (earlier, own) if (log := _read_log(path)) is not None]
            self.write_table("metrics.csv", _joined(logs))
            earlier.unlink()

    @property
    def export(self) -> Path:
        return self.path / "export"

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / f"{name}.ckpt"

    def write_text(self, name: str, text: str) -> None:
        with self.replacing(name) as partial:
            partial.write_text(text, encoding="utf-8")

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        with self.replacing(name) as partial:
            table.to_csv(partial, index=False, sep="\t" if name.endswith(".tsv") else ",")

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A temporary path that takes its name when the block succeeds."""
        with replacing(self.path / name) as partial:
            yield partial


def claim(options: RunOptions) -> tuple[RunDirectory, bool]:
    """The run directory, and whether this is the first of the processes that share it."""
    if is_first_process(os.environ):
        name = options.name
        if "WANDB_SWEEP_ID" in os.environ and "WANDB_RUN_ID" in os.environ:  # agents start together
            name = f"{name}-{os.environ['WANDB_RUN_ID']}"
        run = RunDirectory.claim(options.run_dir, name, options.existing)
        os.environ[RUN_DIR_OF_FIRST] = str(run.path)
        return run, True
    if RUN_DIR_OF_FIRST not in os.environ and options.run_dir is None:
        raise GateError("started by torchrun or a cluster, all processes need the same --run_dir; give one")
    path = os.environ.get(RUN_DIR_OF_FIRST) or options.run_dir
    return RunDirectory.of_other_process(path, options.name, options.existing), False


def checkpoint_of(options: RunOptions, run: RunDirectory, first: bool) -> str | None:
    """The checkpoint that a run goes on from; None for one that begins, or that was stopped before its first. Where a run that
    began with another's checkpoint is resumed, it is one of its own.

    Raises:
        GateError: for one that would be overwritten.
    """
    kept = [run.checkpoint(name) for name in ("last", "dense") if run.resumes and run.checkpoint(name).is_file()]
    if options.ckpt_path is None or (kept and options.ckpt_path == _options_of(run).get("ckpt_path")):  # it has gone on since
        return str(kept[0]) if kept else None
    if first and not run.resumes and run.path.resolve() in Path(options.ckpt_path).resolve().parents:
        raise GateError(f"--ckpt_path {options.ckpt_path!r} lies in the run that would be overwritten; give another --run_dir")
    return options.ckpt_path


def check_same_options(run: RunDirectory, resolved: str) -> None:
    """Whether a run that is resumed has the options that it began with, but for those that change no result.

    Args:
        run: that is gone on with.
        resolved: the configuration of this command, as YAML.

    Raises:
        GateError: naming the first option that differs.
    """
    file, began, now = run.path / CONFIG, _options_of(run), dict(_flat(yaml.safe_load(resolved)))
    for name in sorted(began.keys() | now.keys()):
        if began.get(name) != now.get(name) and not name.startswith(FREE_WHEN_RESUMED):
            raise GateError(
                f"--existing resume goes on with the options that the run began with, but {name} was {began.get(name)!r} and "
                f"is {now.get(name)!r} now; give --config {file}, or another --run_dir"
            )


def _options_of(run: RunDirectory) -> dict[str, Any]:
    """The options that a run began with, by their names with dots."""
    file = run.path / CONFIG
    try:
        return dict(_flat(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise GateError(f"{str(file)!r} cannot be read ({first_line(error)}); begin the run anew") from error


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Options by their names with dots."""
    for name, value in content.items():
        if isinstance(value, Mapping) and value and prefix in ("", "data.", "trainer.", "wandb."):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
