"""The run directory. Its files are described in ``docs/reference/files.md``."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from filelock import FileLock, Timeout

from gates.errors import GateError
from gates.files import is_partial, naming, refuse_other_than_file, remove, replacing
from training.config import Existing, RunOptions
from training.config.run import check_name
from training.config.yaml_text import read_yaml
from training.runs.launched import is_first_process
from training.runs.stored import parsed_table, read_json, read_text, remove_checksums

# One command at a time writes into a directory. The lock ends with its process, however that ends.

LOCK = ".lock"
WAIT = 6.0
"""Seconds to wait for a lock: children of a killed process, such as data workers, may hold it for a while."""


@contextmanager
def only_writer(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a directory during a ``with`` block. It is made if it is missing, and removed if it stays empty."""
    refuse_file(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = _acquired(folder, WAIT if wait else 0.0)
        try:
            with naming(folder):
                yield
        finally:
            with suppress(OSError):  # Windows keeps open files
                (folder / LOCK).unlink()  # while it is held
            lock.release()
    finally:
        with suppress(OSError):
            for place in made:
                place.rmdir()


def refuse_file(folder: Path) -> None:
    """Raise :class:`GateError` for a directory that is or lies in a file."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise GateError(f"--run_dir {str(folder)!r} is or lies in a file ({str(place)!r}); give a directory")


def refuse_busy(folder: Path) -> None:
    """Raise :class:`GateError` if another process writes into a directory."""
    if (folder / LOCK).is_file():
        _acquired(folder, WAIT).release()


def _acquired(folder: Path, wait: float) -> FileLock:
    if os.path.lexists(folder / LOCK) and not (folder / LOCK).is_file():
        raise GateError(f"{str(folder / LOCK)!r} is no regular file, so it locks nothing; remove it")
    lock = FileLock(folder / LOCK)
    while True:
        try:
            lock.acquire(timeout=wait)
        except Timeout as error:
            raise GateError(
                f"another process is at work in {str(folder)!r}; wait for it, end it, or give another directory"
            ) from error
        if (folder / LOCK).is_file():
            return lock
        lock.release()  # its last holder removed the file after this process opened it


CONFIG = "config.yaml"  # a directory with this file is that of a run
LATENCY = "latency.json"
BUDGET_SEARCH = "budget.json"  # how the budget `auto` was found
METRICS = "metrics.json"
"""The file that marks the tables as complete: written after them, and removed before they change."""
UNFINISHED = "comparison.unfinished.csv"
"""The rows so far of a comparison. Tables of a shorter one before stay until the new ones are complete."""
FOLDERS = ("masks", "plots", "checkpoints")
RUN_DIR_OF_FIRST = "HEAD_GATES_RUN_DIR"
"""Environment variable that names the directory of the first process to those that Lightning starts."""
EARLIER_LOG = "metrics-before-resuming.csv"


def remove_partials(folder: Path) -> None:
    """Remove the partial files of killed processes from a locked folder."""
    for path in list(folder.iterdir()):
        if is_partial(path):
            remove(path)


def _is_remains(path: Path) -> bool:
    """Return whether a run that was stopped before it began may have left this."""
    return is_partial(path) or path.name == LOCK or (path.name in FOLDERS and path.is_dir() and not any(path.iterdir()))


def _holds_run(folder: Path) -> bool:
    """Return whether a directory holds a run. Many other directories have a file called config.yaml."""
    if not (folder / CONFIG).is_file() or all((folder / name).is_dir() for name in FOLDERS):
        return (folder / CONFIG).is_file()
    try:
        options = read_yaml(folder / CONFIG, "the configuration")
    except (GateError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(options, dict) and {"model", "data", "trainer"} <= options.keys()


def _is_comparison(folder: Path) -> bool:
    """Return whether a directory is that of a comparison."""
    return not (folder / "checkpoints").is_dir() and any((folder / part).exists() for part in ("experiments", UNFINISHED))


def _joined_logs(paths: Iterable[Path]) -> pd.DataFrame | None:
    """Join logs, without a last line that is cut off. A later log replaces the steps that it repeats."""
    joined = None
    for path in paths:
        mend = "delete it to continue without the earlier log"
        text = read_text(path, mend=mend) if path.is_file() else ""
        if whole := text[: text.rfind("\n") + 1]:
            log = parsed_table(path, whole, needed=("step",), mend=mend)
            if joined is not None and len(log):
                log = pd.concat([joined[joined["step"] < log["step"].min()], log], ignore_index=True)
            joined = log if len(log) else joined
    return joined


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run.

    Args:
        resumes: Whether it continues the run there.
        is_written: Whether this is the process that writes into it.
    """

    path: Path
    resumes: bool = False
    is_written: bool = True

    @classmethod
    def claim(cls, path: str | None, name: str, existing: Existing) -> RunDirectory:
        """Choose and check the directory. Nothing is written yet.

        Args:
            path: The directory, or None for ``runs/NAME``, with a number if that is taken.
        """
        chosen = Path("runs") / name if path is None else Path(path)
        if path is None and existing == "refuse":
            number = 2
            while chosen.exists():
                chosen = Path("runs") / f"{name}-{number}"
                number += 1
        refuse_file(chosen)
        holds_run = _holds_run(chosen)
        if existing == "resume":
            if holds_run and not _is_comparison(chosen):
                return cls(chosen, resumes=True)
            raise GateError(f"there is nothing to resume in {str(chosen)!r}: it has no config.yaml of a run; check --run_dir")
        if chosen.is_dir() and any(not _is_remains(path) for path in chosen.iterdir()):
            _refuse_taken(chosen, existing, holds_run=holds_run)
        return cls(chosen)

    @classmethod
    def finished(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Return the directory of a run that has ended."""
        found = cls(Path(path))
        if not found.path.is_dir():
            raise GateError(f"the run {str(path)!r} does not exist; give a run directory, or a checkpoint in one")
        if not (found.path / CONFIG).is_file():
            raise GateError(f"{str(path)!r} does not hold a run: it has no config.yaml; give a directory that fit wrote")
        trained = found.export.is_dir() or (found.path / "checkpoints").is_dir()
        if not trained and ((found.path / METRICS).is_file() or _is_comparison(found.path)):
            raise GateError(f"{str(path)!r} holds a comparison or other results, not a run; give a directory that fit wrote")
        for part in (found.path / METRICS, found.checkpoint("final"), found.export / "config.json"):
            if not part.is_file():
                raise GateError(
                    f"the run in {str(path)!r} has not ended: it has no {part.relative_to(found.path)}; continue it by "
                    "head-gates fit --existing resume"
                )
        return found

    def create(self, config_yaml: str) -> None:
        """Make the folders and save the resolved configuration. An old run is removed unless it is resumed; its own
        configuration stays until the new one replaces it."""
        self.path.mkdir(parents=True, exist_ok=True)
        remove_checksums(self.path)
        for path in list(self.path.iterdir()):
            if path.name not in (CONFIG, LOCK) and not self.resumes:
                remove(path)
        for folder in ("", *FOLDERS):
            (self.path / folder).mkdir(exist_ok=True)
            remove_partials(self.path / folder)
        logs = _joined_logs(self.path / name for name in (EARLIER_LOG, "metrics.csv")) if self.resumes else None
        if logs is not None:  # the logger starts a new file
            self.write_table(EARLIER_LOG, logs)
        self.write_text(CONFIG, config_yaml)

    def holds(self, config_yaml: str) -> bool:
        """Return whether the directory holds a run of this resolved configuration, which can be resumed."""
        file = self.path / CONFIG
        return self.resumes or (file.is_file() and file.read_text(encoding="utf-8") == config_yaml)

    def join_logs(self) -> None:
        """Join the log of an interrupted run and that of its resumption in ``metrics.csv``."""
        earlier, own = self.path / EARLIER_LOG, self.path / "metrics.csv"
        if earlier.is_file():
            if (logs := _joined_logs((earlier, own))) is not None:
                self.write_table("metrics.csv", logs)
            earlier.unlink()

    def withdraw(self) -> None:
        """Remove the files that call the tables complete, before the tables change."""
        remove_checksums(self.path)
        (self.path / METRICS).unlink(missing_ok=True)

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

    def write_records(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Write a JSON list with one line for each record."""
        lines = ",\n".join(json.dumps(record, allow_nan=False) for record in records)
        self.write_text(name, f"[\n{lines}\n]\n")

    def read_json(self, name: str) -> Any:
        return read_json(self.path / name, object)

    def write_table(self, name: str, table: pd.DataFrame) -> None:
        with self.replacing(name) as partial:
            table.to_csv(partial, index=False, sep="\t" if name.endswith(".tsv") else ",")

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """Yield a temporary path that takes its name when the block succeeds."""
        with replacing(self.path / name) as partial:
            yield partial


def _refuse_taken(folder: Path, existing: Existing, *, holds_run: bool) -> None:
    """Raise :class:`GateError` if a directory that is not empty may not be overwritten."""
    if not holds_run:
        raise GateError(
            f"{str(folder)!r} is not empty and does not hold a run, so nothing is written there; give another --run_dir"
        )
    if existing == "refuse":
        raise GateError(
            f"{str(folder)!r} already holds a run; continue it (--existing resume), replace it (--existing overwrite) or "
            "give another --run_dir"
        )
    if _is_comparison(folder):
        raise GateError(f"{str(folder)!r} holds a comparison and no run; give another --run_dir, or remove it")
    if folder.is_symlink():
        raise GateError(
            f"--run_dir {str(folder)!r} is a symbolic link, and --existing overwrite would remove what lies in "
            f"{str(folder.resolve())!r}; give that directory itself"
        )


@contextmanager
def locked_directory(options: RunOptions) -> Iterator[RunDirectory]:
    """Yield the run directory, locked by the first of the processes that share it."""
    if not is_first_process(os.environ):
        path = os.environ.get(RUN_DIR_OF_FIRST) or options.run_dir
        if path is None:
            raise GateError("started by torchrun or a cluster, all processes need the same --run_dir; give one")
        yield RunDirectory(Path(path), resumes=options.existing == "resume", is_written=False)
        return
    name = options.name
    if "WANDB_SWEEP_ID" in os.environ and "WANDB_RUN_ID" in os.environ:  # agents start together
        check_name(os.environ["WANDB_RUN_ID"], "WANDB_RUN_ID")
        name = f"{name}-{os.environ['WANDB_RUN_ID']}"
    numbered = options.run_dir is None and options.existing == "refuse"
    with ExitStack() as lock:
        while True:
            found = RunDirectory.claim(options.run_dir, name, options.existing)
            try:
                lock.enter_context(only_writer(found.path, wait=not numbered))
                run = RunDirectory.claim(str(found.path), name, options.existing)  # again, now that it is locked
                break
            except GateError:
                lock.close()
                if not numbered:
                    raise  # otherwise another process was faster, and the next number is free
        os.environ[RUN_DIR_OF_FIRST] = str(run.path)
        yield run


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """Lock the run or comparison that an output lies in, if any, during a ``with`` block."""
    own = output.absolute()
    places = [place for place in (own, *own.parents) if (place / CONFIG).is_file()]
    held = next((place for place in places if any((place / part).is_dir() for part in ("checkpoints", "experiments"))), None)
    with nullcontext() if held is None else only_writer(held):
        yield


# The file or folder that ``--output`` names.


def check_output_folder(folder: str | os.PathLike[str], names: Collection[str]) -> None:
    """Raise :class:`GateError` for an ``--output`` that is no folder, or holds other files than a command writes."""
    if not os.path.lexists(folder):
        return
    if not os.path.isdir(folder):
        raise GateError(f"--output {os.fspath(folder)!r} is no folder, so nothing is written there; give another name")
    for name in sorted(os.listdir(folder)):
        if name not in names and not is_partial(Path(name)):
            raise GateError(
                f"--output {os.fspath(folder)!r} holds {name!r}, which this command does not write; give a folder of its own"
            )
        refuse_other_than_file(os.path.join(folder, name))


def check_new_output(path: str | os.PathLike[str], mark: str, what: str) -> None:
    """Raise :class:`GateError` as :func:`check_output`, and for an ``--output`` whose folder cannot be written to."""
    if not (parent := Path(path).resolve().parent).is_dir() or not os.access(parent, os.W_OK):
        raise GateError(f"cannot write {os.fspath(path)!r}: its folder does not exist or is read-only; give another file")
    check_output(path, mark, what)


LOOKED_AT = 4096
"""Bytes at the beginning of a file that identify it."""


def check_output(path: str | os.PathLike[str], mark: str, what: str) -> None:
    """Raise :class:`GateError` for an ``--output`` that is neither empty nor an earlier file of the command.

    Args:
        mark: A text near the beginning of every such file.
    """
    path = os.path.realpath(path)
    refuse_other_than_file(path)
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        beginning = file.read(LOOKED_AT)
    if beginning.strip() not in (b"", b"[]") and mark.encode() not in beginning:
        raise GateError(f"--output {path!r} is there and is no {what}, so it is not replaced; give another name, or remove it")


# The end of a run.

FINISHED = "finished.json"
"""The file that is written last of all, with the names of the files of the run."""
AT_THE_END = ("compare", "retrained", "from_scratch", "from_scratch_epochs", "from_scratch_learning_rate", "curve")
"""Options of the comparison at the end of a run, which may change when the run is resumed."""


def mark_finished(run: RunDirectory) -> None:
    """State that the run has ended, and the names of its files. Experiments and W&B's files may be removed later."""
    files = [path.relative_to(run.path) for path in run.path.rglob("*") if path.is_file()]
    others = ("experiments", "wandb", FINISHED, EARLIER_LOG)
    results = [file for file in files if file.parts[0] not in others and not any(part.startswith(".") for part in file.parts)]
    run.write_json(FINISHED, {"files": sorted(map(str, results))})


def is_finished(run: RunDirectory, resolved: str) -> bool:
    """Return whether the run has ended, all its files are there, and this command asks for nothing else."""
    try:
        files = [run.path / str(file) for file in read_json(run.path / FINISHED, dict)["files"]]
        began = read_yaml(run.path / CONFIG, "the configuration")
    except (GateError, OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return False  # then the end of the run is made again
    now = yaml.safe_load(resolved)
    return all(began.get(name) == now.get(name) for name in AT_THE_END) and all(file.is_file() for file in files)


def unmark_finished(run: RunDirectory) -> None:
    """Remove the statement that the run has ended."""
    (run.path / FINISHED).unlink(missing_ok=True)
