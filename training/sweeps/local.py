"""``python -m training sweep FILE``: run a sweep file of W&B's format on this machine, without an account.

Optuna chooses the trials; each is a ``python -m training.fit`` of its own. The same command again goes on with a sweep that
was stopped. The directory of a sweep::

    sweep.yaml         what was searched, and with which further arguments
    study.db           Optuna's storage (SQLite), from which everything below is written; with --storage it is elsewhere
    trials/N/          the run directory of trial N, trials/N.log what it printed
    sweep.csv          one row per trial, after each
    sweep.png          the metric against each option, at the end
    best.yaml          a configuration for training.fit --config: the best trial on the selection split
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from rich.console import Console

from gates.errors import GateError, first_line
from gates.files import replacing
from training.cli.command_line import CommandLine, shipped
from training.cli.exit import stdout
from training.config.yaml_text import read_yaml
from training.runs import progress
from training.runs.directory import CONFIG, LOCK, only_writer
from training.runs.resume import RUN_INPUTS
from training.runs.stored import read_json, read_text
from training.runs.tracking import reachable
from training.sweeps.configurations import CONFIGURATIONS, fingerprints, refuse_changed
from training.sweeps.processes import end, end_orphan, last_error, locked, trial_environment
from training.sweeps.results import show, sweep_table, write_report, write_table
from training.sweeps.space import Sweep, check_own, read_sweep
from training.sweeps.studies import (
    UNREACHABLE,
    WORKER,
    Trials,
    as_json,
    check_storage,
    shared_study,
    study_of,
    unreachable,
    without_password,
)


@dataclass
class Job:
    """A trial that is running: its process leads a process group."""

    trial: optuna.Trial
    process: subprocess.Popen[bytes]
    slot: int
    started: float = field(default_factory=lambda: time.monotonic())


@dataclass(frozen=True)
class LocalSweep:
    """A sweep on this machine.

    Args:
        sweep: what to search.
        directory: where everything is written.
        trials: those that there are, and the next ones.
        further: arguments of ``training.fit`` for every trial.
        jobs: trials at a time.
        timeout_minutes: after which a trial is ended and counts as failed; None for no limit.
        console: where results are told.
        environment: of every trial's process, beside what this one has.
    """

    sweep: Sweep
    directory: Path
    trials: Trials
    further: tuple[str, ...]
    jobs: int
    timeout_minutes: float | None
    console: Console
    environment: Mapping[str, str]

    def run(self) -> None:
        """Run until all trials have ended; leaves a state that can be gone on from, whatever happens."""
        left_behind, running = self.trials.left_behind(), list[Job]()
        ended = sum(trial.state.is_finished() for trial in self.trials.known())
        shown = progress.begin("trials", max(self.trials.count, len(self.trials.known())), ended)
        try:
            for number in left_behind:
                end_orphan(self._lock(number))
            while True:
                while len(running) < self.jobs and (left_behind or self.trials.open()):
                    trial = self.trials.drawn(left_behind.pop(0)) if left_behind else self.trials.next()
                    if trial is None:
                        break
                    running.append(self._start(trial, slot=min(set(range(self.jobs)) - {job.slot for job in running})))
                shown.advance(0, lambda: f"{len(running)} under way")
                if not running and not self.trials.open():
                    return
                time.sleep(0.2)
                for job in list(running):
                    ended = job.process.poll() is not None
                    passed = time.monotonic() - job.started
                    late = not ended and self.timeout_minutes is not None and passed > 60 * self.timeout_minutes
                    if late or ended:
                        if late:
                            end([job.process])
                        running.remove(job)
                        self._finish(job, late=late)
                        shown.advance()
        finally:
            shown.end(completed=False)
            end([job.process for job in running])
            write_report(self.sweep, self.trials.study, self.directory)

    def _lock(self, number: int) -> Path:
        return self.directory / "trials" / f"{number}.pid"

    def _start(self, trial: optuna.Trial, slot: int) -> Job:
        run = self.directory / "trials" / str(trial.number)
        resumes = (run / RUN_INPUTS).is_file()
        if not resumes:
            shutil.rmtree(run, ignore_errors=True)  # a process that was killed before it began to train
        own = [f"--run_dir={run}", f"--wandb.group={self.directory.name}", f"--wandb.name={self.directory.name}-{trial.number}"]
        own += ["--existing=resume"] if resumes else []
        command = self.sweep.trial_command(self.sweep.values(trial.params), [*self.further, *own])
        run.parent.mkdir(exist_ok=True)
        with run.with_suffix(".log").open("ab") as log, locked(self._lock(trial.number)) as lock:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # so that Ctrl+C reaches the sweep alone, which ends its trials
                pass_fds=[lock.fileno()],  # held while the process lives
                env=trial_environment(self.jobs, slot) | dict(self.environment),
            )
            lock.write(str(process.pid))
        return Job(trial, process, slot)

    def _finish(self, job: Job, *, late: bool) -> None:
        """Record a trial that has ended: its result, or the line that says why there is none."""
        number, seconds = job.trial.number, round(time.monotonic() - job.started, 1)
        run = self.directory / "trials" / str(number)
        self.trials.note(number, "seconds", seconds)
        options = ", ".join(f"{name}={value}" for name, value in self.sweep.values(job.trial.params).items())
        if late or job.process.returncode != 0:
            log = run.with_suffix(".log")
            reason = f"not done after {self.timeout_minutes:g} minutes" if late else last_error(log, job.process.returncode)
            self.trials.tell(number, error=reason)
            told = f"trial {number} failed after {seconds:.0f} s ({options}): {reason}"
        else:
            metrics = read_json(run / "metrics.json", dict)
            result = metrics["run"]["result"] | {"all_heads": metrics["heads"]}
            self.trials.note(number, "result", result)
            if self.trials.worker is not None:  # whose report may be written on another machine
                self.trials.note(number, CONFIG, read_text(run / CONFIG))
            if self.sweep.column not in result:
                found = ", ".join(name.replace("_", "/", 1) for name in result if name.startswith("select_"))
                reason = f"the sweep's metric is {self.sweep.metric!r}, which trial {number} does not have; it has {found}"
                self.trials.tell(number, error=reason)
                raise GateError(reason)  # the others will not have it either
            self.trials.tell(number, result[self.sweep.column])
            told = f"trial {number}: {self.sweep.metric} {result[self.sweep.column]:.4f}, {result['heads']} of "
            told += f"{result['all_heads']} heads, {seconds:.0f} s ({options})"
        with progress.paused():
            self.console.print(told, markup=False, highlight=False, soft_wrap=True)
        write_table(self.sweep, self.trials.study, self.directory)


def _claimed_by(file: Path) -> dict[str, Any]:
    """What ``sweep.yaml`` in a directory says that it holds."""
    try:
        found = read_yaml(file, "the note of an earlier sweep")
        if not isinstance(found, dict):
            raise yaml.YAMLError(f"it holds {found!r:.40}")
    except yaml.YAMLError as error:
        raise GateError(f"{str(file)!r} is damaged ({first_line(error)}); give another --run_dir") from error
    return found


def described_by(sweep: Sweep, further: Sequence[str], seed: int) -> dict[str, Any]:
    """All that makes a sweep this one, as JSON."""
    described = as_json(asdict(sweep) | {"further": list(further), "seed": seed})
    described[CONFIGURATIONS] = fingerprints(sweep, further)
    for name in ("run_cap", "unused"):  # which may differ when a sweep goes on
        del described[name]
    return described


def claim(directory: Path, described: Mapping[str, Any], storage: str | None = None) -> str | None:
    """State in the directory which sweep it holds, or see that it is this very one.

    Args:
        directory: of the sweep.
        described: all that makes it this sweep.
        storage: database that it shares with others, without a password.

    Returns:
        The name by which trials of this directory are known in the database; None without one.

    Raises:
        GateError: if it holds something else.
    """
    file = directory / "sweep.yaml"
    if file.is_file():
        found = _claimed_by(file)
        changed = [name for name in described if found.get(name) != described[name]]
        if changed[:1] == [CONFIGURATIONS]:  # whose fingerprints tell nobody anything
            refuse_changed(directory, found.get(CONFIGURATIONS), described[CONFIGURATIONS])
        changed += ["storage"] * (found.get("storage") != storage)
        if changed:
            raise GateError(
                f"{str(directory)!r} holds a sweep whose {changed[0]} is {found.get(changed[0])!r}; give another --run_dir"
            )
        return found.get(WORKER)
    if any(path.name != LOCK for path in directory.iterdir()):
        raise GateError(f"{str(directory)!r} is there and does not hold a sweep; give another --run_dir")
    shared = {} if storage is None else {"storage": storage, WORKER: uuid.uuid4().hex}
    with replacing(file) as partial:
        partial.write_text(yaml.safe_dump({**described, **shared}, sort_keys=False), encoding="utf-8")
    return shared.get(WORKER)


def run_sweep(line: CommandLine) -> None:
    """The whole command."""
    options, further = line.options, line.rest
    for name, value in {
        "--jobs": options.jobs,
        "--trials": options.trials,
        "--timeout_minutes": options.timeout_minutes,
    }.items():
        if value is not None and not value > 0:
            raise GateError(f"{name} is {value}; expected more than 0")
    if options.storage is not None:
        check_storage(options.storage)
    sweep = read_sweep(Path(shipped(options.file)))
    check_own(further)
    count = sweep.count(options.trials)
    of_trials = sweep.check(further)
    for key in sweep.unused:
        print(f"warning: {key} means something to W&B only; here every trial runs to its end", file=sys.stderr)
    directory = Path(options.run_dir or Path("runs") / "sweeps" / sweep.name)
    console = stdout()
    offline = {"WANDB_MODE": "offline"} if reachable(of_trials).mode == "offline" else {}  # so that no trial tries by itself
    storage = options.storage
    with only_writer(directory):
        described = described_by(sweep, further, options.seed)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if storage is None:
            worker = claim(directory, described)
            study = study_of(directory, maximize=sweep.maximize)
        else:
            study = shared_study(storage, sweep, described)
            worker = claim(directory, described, without_password(storage))
        trials = Trials(study, sweep, count, options.seed, worker)
        before = len(trials.known())
        console.print(f"{sweep.name}: {count} trials, {options.jobs} at a time" + f" ({before} begun before)" * bool(before))
        local = LocalSweep(
            sweep=sweep,
            directory=directory,
            trials=trials,
            further=tuple(further),
            jobs=options.jobs,
            timeout_minutes=options.timeout_minutes,
            console=console,
            environment=offline,
        )
        try:
            local.run()
            table = sweep_table(sweep, study)
        except UNREACHABLE as error:
            if storage is None:
                raise
            raise GateError(f"{unreachable(storage, error)}; the same command goes on where it was") from error
    if not (table["state"] == "complete").any():
        if (table["state"] == "running").any():
            console.print("no trial has a result yet; others are at work on some")
            return
        raise GateError(f"all {len(table)} trials failed, the last with: {table['error'].iloc[-1]}")
    show(console, sweep, table, study.best_trial.number, directory)
