"""The trials of a sweep in Optuna's database: a file of the sweep's directory, or a database that several machines share.

A grid and a random search are planned: their trials wait in the database, which gives each of them to one process alone. A
Bayesian search draws a trial when it begins.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gates.errors import GateError, first_line
from training.sweeps.space import Sweep

FILE = "study.db"
PARAMS, WORKER = "params", "worker"
"""Attributes of a trial: its planned parameters, and the directory that runs it."""


@dataclass(frozen=True)
class Trial:
    """A trial that has begun.

    Args:
        state: ``running``, ``complete`` or ``failed``.
        notes: What :meth:`Trials.note` has kept of it.
    """

    number: int
    values: dict[str, Any]
    state: str
    notes: dict[str, Any]


@dataclass(frozen=True)
class Trials:
    """The trials of a sweep, which other machines may work on at the same time.

    Args:
        worker: The name of this directory among those that share the study; empty if it is the only one.
    """

    study: optuna.Study
    sweep: Sweep
    count: int
    seed: int
    worker: str = ""

    def plan(self) -> None:
        """Put the trials that do not depend on results into the database, unless they are there."""
        for params in self.sweep.fixed_parameters(self.count, self.seed)[len(self.study.get_trials(deepcopy=False)) :]:
            self.study.enqueue_trial(params, user_attrs={PARAMS: params})

    def begun(self) -> list[Trial]:
        """Return all trials that have begun."""
        states = {TrialState.RUNNING: "running", TrialState.COMPLETE: "complete", TrialState.FAIL: "failed"}
        attributes = self.study.user_attrs
        return [
            Trial(one.number, self.sweep.values(_params(one)), states[one.state], attributes.get(str(one.number), {}))
            for one in self.study.get_trials(deepcopy=False, states=tuple(states))
        ]

    def left_behind(self) -> list[int]:
        """Return the numbers of the trials that a killed sweep of this directory had begun."""
        found = []
        for one in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if one.user_attrs.get(WORKER, "") != self.worker:
                continue
            if _params(one).keys() < self.sweep.space.keys():  # killed before all options were drawn
                self.study.tell(one.number, state=TrialState.FAIL)
            else:
                found.append(one.number)
        return found

    def are_left(self) -> bool:
        """Return whether trials have yet to begin."""
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return (self.sweep.method == "bayes" or bool(waiting)) and len(self.begun()) < self.count

    def begin(self) -> int | None:
        """Begin the next trial; return its number, or None if another machine took it."""
        startup = min(10, -(-self.count // 3))  # random trials first: Optuna's default, or a third of a short search
        draw = self.seed * 1_000_003 + len(self.study.get_trials(deepcopy=False)) + zlib.crc32(self.worker.encode())
        self.study.sampler = optuna.samplers.TPESampler(seed=draw % 2**32, n_startup_trials=startup, constant_liar=True)
        trial = self.study.ask(self.sweep.space)
        if self.sweep.method != "bayes" and PARAMS not in trial.user_attrs:
            self.study.tell(trial, state=TrialState.PRUNED)
            return None
        if self.worker:
            trial.set_user_attr(WORKER, self.worker)
        return trial.number

    def end(self, number: int, value: float | None, **notes: Any) -> None:
        """End a trial with its value, or as failed without one; keep notes about it."""
        self.study.set_user_attr(str(number), notes)
        self.study.tell(number, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)


def _params(trial: FrozenTrial) -> dict[str, Any]:
    return trial.user_attrs.get(PARAMS, trial.params)


def worker_of(directory: Path) -> str:
    """Return the name of a directory among those that share a database."""
    return f"{platform.node()}:{directory.resolve()}"


@contextmanager
def opened(directory: Path, sweep: Sweep, storage: str | None) -> Iterator[optuna.Study]:
    """Open the study of a sweep.

    Args:
        storage: The address of the database that machines share, or None for a file in the directory.
    """
    file = directory / FILE
    shown = str(file) if storage is None else without_password(storage)
    if storage is None and not file.exists() and any(directory.glob("trials/*")):
        raise GateError(f"{shown!r} is gone, without which its trials are unknown; give another --run_dir")
    try:
        url = make_url(storage) if storage is not None else URL.create("sqlite", database=str(file.resolve()))
        is_file = url.get_backend_name() == "sqlite"
        wait = {"connect_args": {"timeout": 60.0}} if is_file else {}  # seconds for another process that writes
        if is_file and url.database in (None, "", ":memory:"):
            raise GateError(f"--storage is {shown!r}, which is gone with its process; give a file: sqlite:////shared/sweeps.db")
        yield optuna.create_study(
            storage=optuna.storages.RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=wait),
            study_name=sweep.name,
            direction="maximize" if sweep.maximize else "minimize",
            load_if_exists=True,
        )
    except (ArgumentError, ImportError, SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        raise GateError(
            f"the database {shown!r} cannot be used ({first_line(error)}); expected one that can be reached, such as "
            "sqlite:////shared/sweeps.db or postgresql+psycopg://USER@HOST/NAME with its driver installed; then the same "
            "command continues, or give another --run_dir"
        ) from error


def without_password(url: str) -> str:
    """Return the address of a database without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return url
