"""A comparison as a graph of tasks, for doing several at a time: the dense model, masks that are chosen on it, and what is done
with each mask. A task leaves nothing but finished experiments, which whoever comes later finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gates.budget import Budget
from training.comparison.experiments import Experiments
from training.comparison.methods import Method
from training.comparison.plan import DENSE, Planned, run_stage, uses_of
from training.comparison.selection import MaskSelector
from training.config.stages import AT_TOTAL_COST, is_of_dense

BASIC = frozenset({"distil"})
"""Modifiers that change what a method learns, and not what is made of it."""


@dataclass(frozen=True)
class Task:
    """A piece of a comparison that is done in one go.

    Args:
        seed: of the comparison.
        method: whose mask is chosen.
        budget: of the mask.
        stage: what is done with the mask; None for nothing beyond choosing it.
        uses: for which weights the mask is chosen, see :meth:`MaskSelector.select`.
        needs: places in the list of the tasks on whose experiments it builds.
    """

    seed: int
    method: Method
    budget: Budget | None
    stage: str | None
    uses: tuple[bool, ...]
    needs: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the task, for people."""
        what = self.method.name if self.budget is None else f"{self.method.name}, budget {self.budget.total}"
        return f"seed {self.seed}, {what}, {self.stage or 'the choice of heads'}"


def tasks_of(plan: Sequence[Planned], seeds: Sequence[int]) -> list[Task]:
    """All tasks of a plan for some seeds, each behind those that it needs."""
    uses, tasks = uses_of(plan), list[Task]()

    def add(*described: object) -> int:
        tasks.append(Task(*described))  # type: ignore[arg-type]
        return len(tasks) - 1

    for seed in seeds:
        dense = add(seed, DENSE, None, None, uses, ())
        chosen, first = dict[tuple[str, str], int](), dict[str, int]()
        of_dense = dict[str, int]()  # by stage
        for planned in plan:
            place = dense
            for method in _choices(planned.method):
                at = (method.name, repr(planned.budget))
                if at not in chosen:
                    needed = first.get(method.name, place)
                    chosen[at] = add(seed, method, planned.budget, None, uses, (needed,))
                    if not method.modifiers - BASIC and not _is_learned_for_each(method):
                        first.setdefault(method.name, chosen[at])  # makes what all budgets share
                place = chosen[at]
            for stage in planned.stages:
                # What training the dense model on costs is what all may cost together.
                paid = (of_dense[stage],) if stage == AT_TOTAL_COST and planned.method != DENSE else ()
                done = add(seed, planned.method, planned.budget, stage, (is_of_dense(stage),), (place, *paid))
                if planned.method == DENSE:
                    of_dense[stage] = done
    return tasks


def _choices(method: Method) -> list[Method]:
    """The choices on the way to a mask: first what a method scores or learns, which its relatives with searches go on from, and
    then the method itself. The dense model chooses nothing."""
    if method.base == DENSE.base:
        return []
    return list(dict.fromkeys([Method(method.base, method.modifiers & BASIC), method]))


def _is_learned_for_each(method: Method) -> bool:
    """Whether a method learns gates for each budget, so that its budgets share nothing."""
    return method.is_learned and method.learned.decides == "each"


def do(task: Task, experiments: Experiments, selector: MaskSelector) -> None:
    """Do a task, as far as its experiments are not finished."""
    for post_hoc in task.uses:
        selection = selector.select(task.method, task.budget, post_hoc=post_hoc)
        if task.stage is not None:
            run_stage(experiments, task.stage, selection)
