"""Where the trials of a sweep are kept: in a file of its directory, or in a database that several machines share."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from gates.errors import GateError, first_line
from training.sweeps.space import Sweep

WORKER, SWEEP = "worker", "sweep"
"""Attributes of a trial, whose directory it runs in, and of a shared study, what is searched."""
UNREACHABLE = (SQLAlchemyError, optuna.exceptions.OptunaError)
"""What a database that is gone raises."""
TRIES, PAUSE = 3, 1.0
"""To open a database, and seconds between."""
LOCKED = 60.0
"""Seconds to wait for another one that writes into the same file."""


@dataclass(frozen=True)
class Trials:
    """The trials of a sweep, which others may add to at the same time.

    Args:
        study: Optuna's.
        sweep: what is searched.
        count: trials in all.
        seed: of random choices.
        worker: of this directory among those that share the study; None where it is the only one.
    """

    study: optuna.Study
    sweep: Sweep
    count: int
    seed: int
    worker: str | None

    def known(self) -> list[FrozenTrial]:
        """All but those that were given back."""
        return known_trials(self.study)

    def left_behind(self) -> list[int]:
        """Numbers of trials that a process of this directory had under way when it was killed."""
        running = [trial for trial in self.known() if trial.state == TrialState.RUNNING]
        return [trial.number for trial in running if self.worker in (None, trial.user_attrs.get(WORKER))]

    def open(self) -> bool:
        """Whether there are fewer trials than there should be."""
        return len(self.known()) < self.count

    def next(self) -> optuna.Trial | None:
        """A new trial with its options; None if others have begun enough, or the same cell of a grid, in this moment.

        Nobody has a lock on the database. So a trial is written first, and given back if it turns out to be one too many.
        """
        trial_id = self.study._storage.create_new_trial(self.study._study_id, template_trial=self._begun())
        number = self.study._storage.get_trial_number_from_id(trial_id)
        before = sum(trial.number < number for trial in self.known())
        if before >= self.count:
            self._give_back(number)
            return None
        trial = self.drawn(number)
        if self.sweep.method == "grid" and self._is_taken(number):
            self._give_back(number)
            return None
        return trial

    def drawn(self, number: int) -> optuna.Trial:
        """A trial with the options it has; those that were not yet drawn are drawn now."""
        self.study.sampler = self.sweep.sampler(self.count, (self.seed * 1_000_003 + number) % 2**32)
        self.study._thread_local.cached_all_trials = None  # as Study.ask does it
        trial = optuna.Trial(self.study, self._id_of(number))
        for name, distribution in self.sweep.space.items():
            trial._suggest(name, distribution)
        return trial

    def tell(self, number: int, value: float | None = None, *, error: str | None = None) -> None:
        """End a trial: with its value, or failed with the reason."""
        self.study.sampler = optuna.samplers.RandomSampler()  # the grid's would stop an optimisation loop, which is not ours
        if error is not None:
            self.note(number, "error", error)
        self.study.tell(number, value, state=TrialState.COMPLETE if error is None else TrialState.FAIL)

    def note(self, number: int, name: str, content: Any) -> None:
        """Keep something of a trial."""
        self.study._storage.set_trial_user_attr(self._id_of(number), name, content)

    def _begun(self) -> FrozenTrial:
        noted = {} if self.worker is None else {WORKER: self.worker}
        return optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=noted)

    def _id_of(self, number: int) -> int:
        return self.study._storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)

    def _is_taken(self, number: int) -> bool:
        """Whether another trial has the same cell."""
        cells = {trial.number: trial.params for trial in self.known()}
        own = cells.pop(number)
        return own in cells.values()

    def _give_back(self, number: int) -> None:
        self.study.sampler = optuna.samplers.RandomSampler()
        self.study.tell(number, state=TrialState.PRUNED)


def known_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials of a study but those that were given back."""
    return [trial for trial in study.get_trials() if trial.state != TrialState.PRUNED]


def study_of(directory: Path, *, maximize: bool) -> optuna.Study:
    """The trials of a sweep so far, in ``study.db``.

    Args:
        directory: of the sweep.
        maximize: whether more is better.

    Raises:
        GateError: if the file is damaged, or gone while there are trials, or can have no place there.
    """
    file, instead = directory.resolve() / "study.db", "bring back what it was, or give another --run_dir"
    if "?" in str(file):
        raise GateError(
            f"--run_dir {str(directory)!r} has a question mark in its path, where a database's name ends; rename it"
        )
    trials = directory / "trials"
    if not file.exists() and trials.is_dir() and any(trials.iterdir()):
        raise GateError(f"{str(file)!r} is gone, without which nobody knows what the trials beside it are; {instead}")
    try:
        return _opened(f"sqlite:///{file}", "sweep", maximize)
    except (SQLAlchemyError, optuna.exceptions.OptunaError) as error:
        raise GateError(f"cannot read {str(file)!r}: it is damaged ({first_line(error)}); {instead}") from error


def shared_study(url: str, sweep: Sweep, described: Mapping[str, Any]) -> optuna.Study:
    """The study of a sweep's name in a database that several machines share.

    Args:
        url: of the database.
        sweep: what is searched.
        described: all that makes it this sweep, as JSON.

    Raises:
        GateError: if there is no such database, or its study of this name is of another sweep.
    """
    for attempt in range(TRIES):
        try:
            study = _opened(url, sweep.name, sweep.maximize)
            if SWEEP not in study.user_attrs and not study.get_trials(deepcopy=False):
                study.set_user_attr(SWEEP, dict(described))
            found = study.user_attrs.get(SWEEP)
            break
        except ImportError as error:
            raise GateError(
                f"--storage {without_password(url)} needs a driver that is not installed ({first_line(error)}); install it, "
                "such as psycopg for postgresql+psycopg://"
            ) from error
        except UNREACHABLE as error:
            if attempt == TRIES - 1:
                raise unreachable(url, error) from error
            time.sleep(PAUSE)  # another one may be making the same tables
    if not isinstance(found, dict) or found != described:
        names = [name for name in described if not isinstance(found, dict) or found.get(name) != described[name]]
        other = names[0] if names else "options"
        raise GateError(
            f"--storage {without_password(url)} holds a sweep called {sweep.name!r} with other {other}; give this one another "
            "name in its file"
        )
    return study


def unreachable(url: str, error: Exception) -> GateError:
    """A database cannot be had, in one sentence."""
    return GateError(
        f"--storage {without_password(url)} cannot be used: {first_line(error)}; check the address, or leave it out"
    )


def check_storage(url: str) -> None:
    """Raises :class:`GateError` for a text that is no address of a database."""
    try:
        found = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise GateError(
            f"--storage is {url!r}; expected the address of a database, such as sqlite:////shared/sweeps.db or "
            "postgresql://USER@HOST/NAME"
        ) from error
    if found.get_backend_name() == "sqlite" and found.database in (None, "", ":memory:"):
        raise GateError(
            f"--storage is {url!r}, which is gone with its process; give a file, such as sqlite:////shared/sweeps.db"
        )


def without_password(url: str) -> str:
    """A database's address without its password."""
    with suppress(ArgumentError):
        return make_url(url).render_as_string(hide_password=True)
    return url


def _opened(url: str, name: str, maximize: bool) -> optuna.Study:
    waits = {"connect_args": {"timeout": LOCKED}} if make_url(url).get_backend_name() == "sqlite" else {}
    storage = optuna.storages.RDBStorage(url, engine_kwargs=waits)
    direction: Literal["maximize", "minimize"] = "maximize" if maximize else "minimize"
    study = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
    study.get_trials(deepcopy=False)
    return study


def as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """The same as it is read from a file."""
    found: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return found
