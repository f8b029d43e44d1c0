"""The run directory: where everything of a run is written, in a fixed shape.

::

    config.yaml        the resolved configuration
    run_inputs.json    fingerprints of data and model, see :mod:`training.runs.resume`
    latency.json       of a run with a budget in time, how long the model takes with which heads
    metrics.json       results of the run, versions, machine; written when the tables are
    metrics.csv        what was logged at each step
    comparison.csv     every method at the run's budget; with summary.csv, statistics.csv, agreement.csv, verdict.md
    curve.csv          post hoc quality of every ranking at other budgets (selection split)
    scores.csv         raw scores and rankings of every gate
    gates_over_time.csv, masks.json, sites.json, samples.tsv
    masks/*.json       the mask of each method
    plots/*.png        gate heat map, quality by budget, agreement of masks
    checkpoints/       dense.ckpt (end of fine-tuning), final.ckpt
    experiments/       finished pieces of training and evaluation, see :mod:`training.comparison.cache`
    export/            the pruned model
    checksums.json     of the tables, masks and texts, see :mod:`training.runs.stored`
    finished.json      written last of all, see :mod:`training.runs.directory`
    wandb/             W&B's own files, without a home directory its caches too
    .lock              while a process writes here, see :mod:`training.runs.directory`
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
"""Seconds that what a killed process has started, such as the workers that load its data, may live on and hold its lock."""


@contextmanager
def only_writer(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """No other process writes into this directory in the ``with`` block. It is made, and goes again if nothing comes into it.

    Args:
        folder: the directory.
        wait: whether what a killed process has left behind is given time to end.

    Raises:
        GateError: if another process does, or it is or lies in a file.
    """
    refuse_file(folder)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as at_the_end:
        for place in reversed(made):
            at_the_end.callback(_remove_if_empty, place)
        lock = _acquired(folder, WAIT if wait else 0.0)
        at_the_end.callback(lock.release)
        at_the_end.callback(_unlink, folder / LOCK)  # while it is held
        with naming(folder):
            yield


def refuse_file(folder: Path) -> None:
    """Raises :class:`GateError` for a directory that is or lies in a file."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise GateError(f"--run_dir {str(folder)!r} is or lies in a file ({str(place)!r}); give a directory")


def refuse_busy(folder: Path) -> None:
    """Raises :class:`GateError` if another process writes into a directory."""
    if (folder / LOCK).is_file():
        _acquired(folder, WAIT).release()


def is_abandoned(folder: Path) -> bool:
    """Whether a directory holds nothing but the lock of a process that is gone."""
    if not folder.is_dir() or [path.name for path in folder.iterdir()] != [LOCK]:
        return False
    try:
        _acquired(folder, 0.0).release()
    except GateError:
        return False
    return True


def _acquired(folder: Path, wait: float) -> FileLock:
    """The lock of a directory, held."""
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
        lock.release()  # the one before has removed it since this one opened it, so that it tells nobody anything


def _unlink(path: Path) -> None:
    with suppress(OSError):  # Windows keeps open files
        path.unlink()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


CONFIG = "config.yaml"
"""Makes a directory that of a run."""
LATENCY = "latency.json"
METRICS = "metrics.json"
"""Written when all tables are, and taken away before they change: what a reader goes by."""
UNFINISHED = "comparison.unfinished.csv"
"""Rows so far of a comparison. The tables of an earlier, shorter one stay as they are until the new ones are complete."""
FOLDERS = ("masks", "plots", "checkpoints")
RUN_DIR_OF_FIRST = "HEAD_GATES_RUN_DIR"
"""Environment variable by which the first process tells those that Lightning starts where it writes."""
EARLIER_LOG = "metrics-before-resuming.csv"


def remove_partials(folder: Path) -> None:
    """Remove what processes that were killed have left in a folder into which nobody else writes."""
    for path in list(folder.iterdir()):
        if is_partial(path):
            remove(path)


def _is_remains(path: Path) -> bool:
    """Whether all that this tells is that a run was stopped before it began."""
    return is_partial(path) or path.name == LOCK or (path.name in FOLDERS and path.is_dir() and not any(path.iterdir()))


def _holds_run(folder: Path) -> bool:
    """Whether a directory holds a run, by more than a file called config.yaml, which many others have."""
    if not (folder / CONFIG).is_file() or all((folder / name).is_dir() for name in FOLDERS):
        return (folder / CONFIG).is_file()
    try:
        options = read_yaml(folder / CONFIG, "the configuration")
    except (GateError, yaml.YAMLError, RecursionError):
        return False
    return isinstance(options, dict) and {"model", "data", "trainer"} <= options.keys()


def _is_comparison(folder: Path) -> bool:
    """Whether a directory is that of a comparison, which holds no training of its own."""
    return not (folder / "checkpoints").is_dir() and any((folder / part).exists() for part in ("experiments", UNFINISHED))


def _read_log(path: Path) -> pd.DataFrame | None:
    """What was logged, but for a last line that was not written to its end; None if that is nothing."""
    if not path.is_file():
        return None
    mend = "delete it to go on without what was logged before"
    text = read_text(path, mend=mend)
    whole = text[: text.rfind("\n") + 1]
    log = parsed_table(path, whole, needed=("step",), mend=mend) if whole else pd.DataFrame()
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
            while chosen.exists() and not is_abandoned(chosen):
                chosen = Path("runs") / f"{name}-{number}"
                number += 1
        refuse_file(chosen)
        taken = chosen.is_dir() and any(not _is_remains(path) for path in chosen.iterdir())
        holds_run = _holds_run(chosen)
        if existing == "resume":
            if not holds_run or _is_comparison(chosen):
                missing = "" if (chosen / CONFIG).is_file() else f" (it has no {CONFIG})"
                raise GateError(
                    f"there is nothing to resume in {str(chosen)!r}: it does not hold a run{missing}; check --run_dir"
                )
            return cls(chosen, resumes=True)
        if taken and not holds_run:
            raise GateError(
                f"{str(chosen)!r} is not empty and does not hold a run, so nothing is written there; give another --run_dir"
            )
        if taken and existing == "overwrite" and _is_comparison(chosen):
            raise GateError(
                f"{str(chosen)!r} holds a comparison and no run, so --existing overwrite does not replace it; give another "
                "--run_dir, or remove it"
            )
        if taken and existing == "refuse":
            raise GateError(
                f"{str(chosen)!r} already holds a run; go on with it (--existing resume), replace it (--existing overwrite) "
                "or give another --run_dir"
            )
        if taken and chosen.is_symlink():
            raise GateError(
                f"--run_dir {str(chosen)!r} is a symbolic link, and --existing overwrite would remove what lies in "
                f"{str(chosen.resolve())!r}; give that directory itself"
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
        trained = found.export.is_dir() or (found.path / "checkpoints").is_dir()
        if not trained and ((found.path / METRICS).is_file() or _is_comparison(found.path)):
            raise GateError(f"{str(path)!r} holds a comparison or other results, not a run; give a directory that fit wrote")
        for part in (found.path / METRICS, found.checkpoint("final"), found.export / "config.json"):
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
        remove_checksums(self.path)
        for path in list(self.path.iterdir()):
            if path.name not in (CONFIG, LOCK) and not self.resumes:
                remove(path)
        for folder in ("", *FOLDERS):
            (self.path / folder).mkdir(exist_ok=True)
            remove_partials(self.path / folder)
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

    def withdraw(self) -> None:
        """Take back that the tables are complete, before they change."""
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
        """A temporary path that takes its name when the block succeeds."""
        with replacing(self.path / name) as partial:
            yield partial


@contextmanager
def locked_directory(options: RunOptions) -> Iterator[tuple[RunDirectory, bool]]:
    """The run directory, into which nobody else writes in the ``with`` block, and whether this is the first of the processes
    that share it.

    Raises:
        GateError: if it is taken, or another process is at work there.
    """
    if not is_first_process(os.environ):
        if RUN_DIR_OF_FIRST not in os.environ and options.run_dir is None:
            raise GateError("started by torchrun or a cluster, all processes need the same --run_dir; give one")
        path = os.environ.get(RUN_DIR_OF_FIRST) or options.run_dir
        yield RunDirectory.of_other_process(path, options.name, options.existing), False
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
                run = RunDirectory.claim(str(found.path), name, options.existing)  # as it is now that nobody changes it
                break
            except GateError:
                lock.close()
                if not numbered:
                    raise  # otherwise another process was faster, and the next number is free
        os.environ[RUN_DIR_OF_FIRST] = str(run.path)
        yield run, True


@contextmanager
def writing_to(output: Path) -> Iterator[None]:
    """No other process writes in the ``with`` block into the run or comparison that an output lies in, if it does."""
    own = output.absolute()
    places = [place for place in (own, *own.parents) if _holds_work(place)]
    if not places:
        yield
        return
    with only_writer(places[0]):
        yield


def _holds_work(folder: Path) -> bool:
    """Whether a directory is that of a run or a comparison, perhaps one that has not ended."""
    return (folder / CONFIG).is_file() and any((folder / part).is_dir() for part in ("checkpoints", "experiments"))


# Files that a command writes because it was told their names.

LOOKED_AT = 4096
"""Bytes of a file by which it is known."""


def check_output_folder(folder: str | os.PathLike[str], names: Collection[str]) -> None:
    """Whether a command may write these files into its ``--output``, which may hold nothing but earlier ones of them.

    Args:
        folder: where to.
        names: of the files.

    Raises:
        GateError: if it is no folder, or holds something else.
    """
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
    """Whether a command that makes no folders may write its ``--output``.

    Args:
        path, mark, what: see :func:`check_output`.

    Raises:
        GateError: if its folder does not exist or is read-only, or for what :func:`check_output` refuses.
    """
    if not (parent := Path(path).resolve().parent).is_dir() or not os.access(parent, os.W_OK):
        raise GateError(f"cannot write {os.fspath(path)!r}: its folder does not exist or is read-only; give another file")
    check_output(path, mark, what)


def check_output(path: str | os.PathLike[str], mark: str, what: str) -> None:
    """Whether a command may write its ``--output``.

    Args:
        path: where to.
        mark: what stands near the beginning of every such file.
        what: such a file is called.

    Raises:
        GateError: if there is something else than an earlier file of this command, or an empty one.
    """
    path = os.path.realpath(path)
    refuse_other_than_file(path)
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        beginning = file.read(LOOKED_AT)
    if beginning.strip() not in (b"", b"[]") and mark.encode() not in beginning:
        raise GateError(f"--output {path!r} is there and is no {what}, so it is not replaced; give another name, or remove it")


# Whether a run has ended with everything that it was asked for, so that there is nothing to resume.

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
