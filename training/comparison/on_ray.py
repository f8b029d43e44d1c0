"""Do the experiments of a comparison on a cluster of Ray.

Tasks write them into the folder of experiments, which all machines share. The comparison then finds all of them finished, so
its tables are those of one process.
"""

from __future__ import annotations

import os
import pickle
import platform
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gates.errors import GateError, first_line
from gates.gating.budget import Budget
from training.comparison.experiments import Experiments
from training.comparison.methods import Method
from training.comparison.plan import DENSE, RUN_STAGE, Comparison, PlanEntry, uses_of
from training.comparison.selection import MaskSelector
from training.config import LauncherOptions
from training.config.comparison import AT_TOTAL_COST, is_of_dense
from training.runs import progress
from training.runs.launched import VARIABLES
from training.runs.own_code import folders_fingerprint, import_from_here
from training.runs.ray_cluster import gpus_per_task
from training.runs.tracking import versions
from training.setup import quiet_libraries

# A comparison as a graph of tasks: the dense model, the masks that are chosen on it, and the stages of each mask. Several tasks
# run at a time. A task leaves nothing but finished experiments, which later tasks find.

BASIC = frozenset({"distil"})
"""The modifiers that change the training of a method."""


@dataclass(frozen=True)
class Task:
    """Hold a part of a comparison that one worker does.

    Args:
        stage: The stage of the mask. None to only choose it.
        uses: The values of ``post_hoc`` in :meth:`MaskSelector.select`.
        needs: The indices of the tasks whose experiments it uses.
    """

    seed: int
    method: Method
    budget: Budget | None
    stage: str | None
    uses: tuple[bool, ...]
    needs: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name of the task for messages."""
        what = self.method.name if self.budget is None else f"{self.method.name}, budget {self.budget.total}"
        return f"seed {self.seed}, {what}, {self.stage or 'the choice of heads'}"


def tasks_of(plan: Sequence[PlanEntry], seeds: Sequence[int]) -> list[Task]:
    """Return all tasks of a plan for some seeds, each after those that it needs."""
    uses, tasks = uses_of(plan), list[Task]()

    def add(*described: object) -> int:
        tasks.append(Task(*described))  # type: ignore[arg-type]
        return len(tasks) - 1

    for seed in seeds:
        dense = add(seed, DENSE, None, None, uses, ())
        chosen, first = dict[tuple[str, str], int](), dict[str, int]()
        of_dense = dict[str, int]()  # by stage
        for entry in plan:
            place = dense
            for method in _choices(entry.method):
                at = (method.name, repr(entry.budget))
                if at not in chosen:
                    needed = first.get(method.name, place)
                    chosen[at] = add(seed, method, entry.budget, None, uses, (needed,))
                    for_each = method.is_learned and method.learned.decides == "each"  # so budgets share no training
                    if not method.modifiers - BASIC and not for_each:
                        first.setdefault(method.name, chosen[at])  # makes what all budgets share
                place = chosen[at]
            for stage in entry.stages:
                # What training the dense model on costs is what all may cost together.
                paid = (of_dense[stage],) if stage == AT_TOTAL_COST and entry.method != DENSE else ()
                done = add(seed, entry.method, entry.budget, stage, (is_of_dense(stage),), (place, *paid))
                if entry.method == DENSE:
                    of_dense[stage] = done
    return tasks


def _choices(method: Method) -> list[Method]:
    """Return the choices on the way to a mask: the method without searches, which other methods share, then the method.

    The dense model chooses nothing.
    """
    if method.base == DENSE.base:
        return []
    return list(dict.fromkeys([Method(method.base, method.modifiers & BASIC), method]))


def do(task: Task, experiments: Experiments, selector: MaskSelector) -> None:
    """Do the unfinished experiments of a task."""
    for post_hoc in task.uses:
        selection = selector.select(task.method, task.budget, post_hoc=post_hoc)
        if task.stage is not None:
            RUN_STAGE[task.stage](experiments, selection)


TRIES = 3
"""The number of times that a task is repeated if its worker is lost."""
LOOK = 1.0
"""The seconds after which Ctrl+C is noticed."""


@dataclass(frozen=True)
class Terms:
    """Hold the facts that every worker needs.

    Args:
        comparison: The comparison, pickled, because a user's own data are only importable in the directory of the command.
        directory: The directory of the command, to which paths are relative.
        mark: A file in the folder of experiments, which exists while the command runs.
        on_gpu: Whether tasks get a share of a GPU.
    """

    comparison: bytes
    directory: Path
    mark: Path
    software: Mapping[str, str]
    threads: int
    on_gpu: bool


def do_on_ray(comparison: Comparison, plan: Sequence[PlanEntry], options: LauncherOptions) -> None:
    """Do all experiments of a comparison, several at a time, on the connected cluster.

    If a worker is lost, another one repeats its work from the last checkpoint.
    """
    import ray

    gpus = gpus_per_task(options, comparison.setup.trainer.accelerator)
    torch.set_num_threads(options.ray_cpus_per_task)  # the recorded machine then holds for the tasks too
    tasks = tasks_of(plan, comparison.seeds)
    remote = ray.remote(work).options(num_cpus=options.ray_cpus_per_task, num_gpus=gpus, max_retries=TRIES)
    with marked(comparison.experiments) as mark, progress.stage("experiments on Ray", len(tasks)) as shown:
        terms = Terms(
            comparison=pickle.dumps(comparison),
            directory=Path.cwd(),
            mark=mark,
            software=software(),
            threads=options.ray_cpus_per_task,
            on_gpu=gpus > 0,
        )
        shared, promised = ray.put(terms), list[Any]()
        for task in tasks:
            promised.append(remote.remote(shared, task, *(promised[place] for place in task.needs)))
        under_way = dict(zip(promised, tasks, strict=True))
        while under_way:
            for done in ray.wait(list(under_way), timeout=LOOK)[0]:
                check_done(done, under_way.pop(done))
                shown.advance()


def check_done(promised: Any, task: Task) -> None:
    """Raise the error that ended a task: :class:`GateError` for a user's error, and otherwise the error itself."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        complaint = ray.get(promised)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise GateError(
            f"the worker of an experiment ({task.name}) was lost {TRIES + 1} times: {first_line(error).rstrip('.')}; start the "
            "same command again, which continues"
        ) from error
    if complaint is not None:
        raise GateError(complaint)


def work(terms: Terms, task: Task, *before: str | None) -> str | None:
    """Do a task in a worker.

    Args:
        before: The complaints of the tasks that it needs.

    Returns:
        A complaint for the user in one sentence; None on success.
    """
    complaint = next(filter(None, before), None)
    if complaint is not None:
        return complaint
    try:
        take_place(terms)
        do(task, *opened(terms.comparison, task.seed))
    except GateError as error:
        return str(error)
    return None


def take_place(terms: Terms) -> None:
    """Work in the directory of the command, with its settings."""
    here = f"the machine {platform.node()} of the cluster"
    if not terms.directory.is_dir():
        raise GateError(
            f"{here} has no directory {str(terms.directory)!r}; start the command in one that all its machines share"
        )
    os.chdir(terms.directory)
    if not terms.mark.is_file():
        raise GateError(
            f"the experiments in {str(terms.mark.parent)!r} are not those that {here} has there; give --experiments a "
            "directory that all machines share"
        )
    for name, version in software().items():
        if version != terms.software.get(name):
            raise GateError(
                f"{here} has {name} {version}, but this one {terms.software.get(name)}, so results could differ; install the "
                "same on both"
            )
    for name in VARIABLES:
        os.environ.pop(name, None)  # those of the launcher that started Ray
    import_from_here()
    torch.set_num_threads(terms.threads)
    if not terms.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # which belong to others
    quiet_libraries()


@lru_cache(maxsize=1)
def opened(comparison: bytes, seed: int) -> tuple[Experiments, MaskSelector]:
    """Return the data and the model of a seed, cached because the next task of a worker mostly needs them again."""
    found: Comparison = pickle.loads(comparison)
    return found.of_seed(seed)


def software() -> dict[str, str]:
    """Return the versions of packages and the hash of this project's code."""
    folders = [Path(__file__).parents[2] / name for name in ("gates", "training")]
    return {**versions(), "code of head-gates": folders_fingerprint(*folders)}


@contextmanager
def marked(folder: Path) -> Iterator[Path]:
    """Keep a file in the folder during a ``with`` block, by which other machines recognise the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".shared-{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
