"""``python -m training sweep FILE``: run a sweep file of W&B's format on this machine, without an account.

Optuna chooses the trials; each is a ``python -m training.fit`` of its own. The same command continues a sweep that was stopped.
The directory of a sweep has

* ``sweep.yaml``: the searched options and the further arguments;
* ``study.db``: Optuna's database, unless --storage names another;
* ``trials/N/``: the run directory of trial N, with its output in ``trials/N.log``;
* ``sweep.csv``: one row per trial, updated after each;
* ``sweep.png``: the metric against each option, at the end;
* ``best.yaml``: the configuration of the best trial on the selection split.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna
import torch
import yaml
from rich.console import Console

from gates.errors import GateError, first_line
from gates.files import replacing
from training.cli.command_line import CommandLine, configurations_in, shipped
from training.cli.exit import stdout
from training.config.yaml_text import read_yaml
from training.runs import progress
from training.runs.directory import CONFIG, LOCK, only_writer, refuse_busy
from training.runs.hashing import file_fingerprint
from training.runs.resume import RUN_INPUTS
from training.runs.stored import read_json, read_text
from training.runs.tracking import reachable
from training.sweeps.results import show, sweep_table, write_report
from training.sweeps.space import Sweep, check_own, read_sweep
from training.sweeps.study import FILE, Trials, opened, without_password, worker_of

NOTE = "sweep.yaml"
GRACE = 15.0
"""The seconds that a trial has to end after Ctrl+C."""


@dataclass
class Job:
    """A running trial, whose process leads a process group."""

    number: int
    process: subprocess.Popen[bytes]
    slot: int
    started: float = field(default_factory=lambda: time.monotonic())


@dataclass(frozen=True)
class LocalSweep:
    """A sweep on this machine."""

    trials: Trials
    directory: Path
    further: tuple[str, ...]
    jobs: int
    timeout_minutes: float | None
    console: Console
    environment: Mapping[str, str]

    def run(self) -> None:
        """Run until all trials have ended. Whatever happens, the same command can continue."""
        waiting, running = self.trials.left_behind(), list[Job]()
        for number in waiting:
            refuse_busy(self._run_dir(number))
        states = [one.state for one in self.trials.begun()]
        shown = progress.begin("trials", max(self.trials.count, len(states)), len(states) - states.count("running"))
        try:
            while True:
                while len(running) < self.jobs and (waiting or self.trials.are_left()):
                    begun = waiting.pop(0) if waiting else self.trials.begin()
                    if begun is None:
                        break
                    running.append(self._start(begun, slot=min(set(range(self.jobs)) - {job.slot for job in running})))
                shown.advance(0, lambda: f"{len(running)} under way")
                if not running and not self.trials.are_left():
                    return
                time.sleep(0.2)
                for job in list(running):
                    if self._has_ended(job):
                        running.remove(job)
                        shown.advance()
        finally:
            shown.end(completed=False)
            end([job.process for job in running])
            write_report(self.trials, self.directory)

    def _run_dir(self, number: int) -> Path:
        return self.directory / "trials" / str(number)

    def _start(self, number: int, slot: int) -> Job:
        run, name = self._run_dir(number), f"{self.directory.name}-{number}"
        resumes = (run / RUN_INPUTS).is_file()
        if not resumes:
            shutil.rmtree(run, ignore_errors=True)  # its process was killed before it began to train
        own = [f"--run_dir={run}", f"--wandb.group={self.directory.name}", f"--wandb.name={name}"]
        own += ["--existing=resume"] if resumes else []
        (values,) = [one.values for one in self.trials.begun() if one.number == number]
        run.parent.mkdir(exist_ok=True)
        with run.with_suffix(".log").open("ab") as log:
            process = subprocess.Popen(
                self.trials.sweep.trial_command(values, [*self.further, *own]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl+C reaches the sweep alone, which ends its trials
                env=trial_environment(self.jobs, slot) | dict(self.environment),
            )
        return Job(number, process, slot)

    def _has_ended(self, job: Job) -> bool:
        """Return whether a trial has ended or takes too long; then end it and record it."""
        seconds = time.monotonic() - job.started
        late = job.process.poll() is None and self.timeout_minutes is not None and seconds > 60 * self.timeout_minutes
        if late:
            end([job.process])
            self._record_failed(job, round(seconds, 1), f"not done after {self.timeout_minutes:g} minutes")
        elif job.process.poll() is None:
            return False
        elif job.process.returncode != 0:
            log = self._run_dir(job.number).with_suffix(".log")
            self._record_failed(job, round(seconds, 1), last_error(log, job.process.returncode))
        else:
            self._record(job, round(seconds, 1))
        write_report(self.trials, self.directory, whole=False)
        return True

    def _record_failed(self, job: Job, seconds: float, reason: str) -> None:
        self.trials.end(job.number, None, seconds=seconds, error=reason)
        self._say(f"trial {job.number} failed after {seconds:.0f} s: {reason}")

    def _record(self, job: Job, seconds: float) -> None:
        """Record a trial that has ended with results."""
        run, sweep = self._run_dir(job.number), self.trials.sweep
        metrics = read_json(run / "metrics.json", dict)
        result = metrics["run"]["result"] | {"all_heads": metrics["heads"]}
        value = result.get(sweep.column)
        self.trials.end(job.number, value, seconds=seconds, result=result, config=read_text(run / CONFIG))
        if value is None:
            found = ", ".join(name.replace("_", "/", 1) for name in result if name.startswith("select_"))
            raise GateError(f"the sweep's metric is {sweep.metric!r}, which trial {job.number} does not have; it has {found}")
        heads = f"{result['heads']} of {result['all_heads']} heads"
        self._say(f"trial {job.number}: {sweep.metric} {value:.4f}, {heads}, {seconds:.0f} s")

    def _say(self, text: str) -> None:
        with progress.paused():
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


# The processes of trials: their end, their share of the machine, and the reason of a failure.


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send Ctrl+C to processes and their children, and SIGKILL to those that do not end soon, or at another Ctrl+C."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        os.killpg(process.pid, signal.SIGINT)
    deadline = time.monotonic() + GRACE
    try:
        for process in alive:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        for process in alive:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def trial_environment(jobs: int, slot: int) -> dict[str, str]:
    """Return the environment of a trial: its share of the cores, unless OMP_NUM_THREADS is set, and one GPU of several.

    A trial imports this package, also in a folder that has a module ``training`` of its own.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} | os.environ
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment["PYTHONSAFEPATH"] = "1"  # -m does not put the working directory first
    gpus = torch.cuda.device_count()
    if jobs > 1 and gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[slot % gpus]
    return environment


def last_error(log: Path, returncode: int) -> str:
    """Return why a trial failed: the last line that begins with ``error:``, the last line, or the signal that ended it."""
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [f"exit code {returncode}"])[-1].removeprefix("error:").strip()[:500]


# A sweep that continues must keep its description.


def description_of(sweep: Sweep, further: Sequence[str], seed: int, storage: str | None) -> dict[str, Any]:
    """Return everything that a sweep must keep when it continues, as JSON; of configurations a hash of each file."""
    described = asdict(sweep) | {"further": list(further), "seed": seed}
    described["storage"] = None if storage is None else without_password(storage)
    files = [name for _, command in sweep.trial_commands(further) for name in configurations_in(command)]
    described["configurations"] = {
        name: file_fingerprint(Path(shipped(name))) for name in dict.fromkeys(files) if Path(shipped(name)).is_file()
    }
    for name in ("run_cap", "unused"):
        del described[name]
    read_again: dict[str, Any] = json.loads(json.dumps(described, default=str))
    return read_again


def check_same(found: Any, described: Mapping[str, Any], where: str) -> None:
    """Raise :class:`GateError` if a place holds another sweep, or one with other options or configurations."""
    changed = [name for name in described if not isinstance(found, dict) or found.get(name) != described[name]]
    if changed:
        raise GateError(f"{where} holds a sweep with other {changed[0]}; give another --run_dir, or the sweep another name")


def check_directory(directory: Path, described: Mapping[str, Any]) -> None:
    """Raise :class:`GateError` if a directory holds another sweep, or something else."""
    file = directory / NOTE
    if file.is_file():
        try:
            check_same(read_yaml(file, "the note of a sweep"), described, repr(str(directory)))
        except yaml.YAMLError as error:
            raise GateError(f"{str(file)!r} is damaged ({first_line(error)}); give another --run_dir") from error
    elif any(path.name not in (LOCK, FILE) for path in directory.iterdir()):
        raise GateError(f"{str(directory)!r} is there and does not hold a sweep; give another --run_dir")


def run_sweep(line: CommandLine) -> None:
    """Run the whole command."""
    options, further = line.options, line.rest
    for name in ("jobs", "trials", "timeout_minutes"):
        if options[name] is not None and not options[name] > 0:
            raise GateError(f"--{name} is {options[name]}; expected more than 0")
    sweep = read_sweep(Path(shipped(options.file)))
    check_own(further)
    count, wandb = sweep.count(options.trials), sweep.check(further)
    for key in sweep.unused:
        print(f"warning: {key} means something to W&B only; here every trial runs to its end", file=sys.stderr)
    directory, console = Path(options.run_dir or Path("runs") / "sweeps" / sweep.name), stdout()
    offline = {"WANDB_MODE": "offline"} if reachable(wandb).mode == "offline" else {}  # so that no trial tries by itself
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    described = description_of(sweep, further, options.seed, options.storage)
    with ExitStack() as stack:
        stack.enter_context(only_writer(directory))
        check_directory(directory, described)
        study = stack.enter_context(opened(directory, sweep, options.storage))
        if study.get_trials(deepcopy=False):
            check_same(study.user_attrs.get("sweep"), described, "the database")
        study.set_user_attr("sweep", described)
        with replacing(directory / NOTE) as partial:
            partial.write_text(yaml.safe_dump(described, sort_keys=False), encoding="utf-8")
        trials = Trials(study, sweep, count, options.seed, "" if options.storage is None else worker_of(directory))
        trials.plan()
        before = len(trials.begun())
        console.print(f"{sweep.name}: {count} trials, {options.jobs} at a time" + f" ({before} begun before)" * bool(before))
        LocalSweep(trials, directory, tuple(further), options.jobs, options.timeout_minutes, console, offline).run()
        table = sweep_table(trials)
        if (table["state"] == "complete").any():
            show(console, sweep, table, study.best_trial.number, directory)
        elif (table["state"] == "running").any():
            console.print("no trial has a result yet; others are at work on some")
        else:
            raise GateError(f"all {len(table)} trials failed, the last with: {table['error'].iloc[-1]}")
