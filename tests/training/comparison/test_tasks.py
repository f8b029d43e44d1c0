"""The graph of a comparison's tasks: each behind what it needs, and together they leave nothing to do."""

import random
from dataclasses import replace

import pytest
import pytorch_lightning as pl

from gates.gating.budget import Budget
from gates.gating.latency import LatencyTable, SiteTimes, TimeLimit
from tests.training.runs import make_setup
from training.comparison.cache import ExperimentCache
from training.comparison.methods import parse_methods
from training.comparison.on_ray import do, tasks_of
from training.comparison.plan import Comparison, run_seed, uses_of
from training.comparison.tables import Results
from training.config.comparison import AT_TOTAL_COST, STAGES
from training.runs import progress

NAMES = [
    "learned", "learned+swap", "learned+distil", "learned+refit", "lambda", "dsp", "learned(once=true)", "his", "his+rescale",
    "hies", "leave-one-out", "random", "dense+distil",
]  # fmt: skip


SITES = [SiteTimes(f"encoder.{layer}", [0.0, 2.0, 3.0, 3.0, 5.0]) for layer in range(2)]
WITHIN = TimeLimit(7.0, LatencyTable(1.0, SITES))


SIZES = {"encoder": 8}


def plan_of(asked):
    return asked.plan([Budget.parse(budget, SIZES) for budget in asked.budgets])


def comparison(folder, names, *, budgets=(3, 2), stages=("post hoc", "retrained"), seeds=(0,), **settings):
    return Comparison(
        setup=make_setup(**settings),
        methods=parse_methods(names),
        budgets=list(budgets),
        seeds=list(seeds),
        stages=list(stages),
        experiments=folder / "experiments",
        searches={"distil": {"distil": 0.5}},
    )


def test_every_task_stands_behind_those_it_needs(tmp_path):
    tasks = tasks_of(plan_of(comparison(tmp_path, NAMES, stages=STAGES)), seeds=[5, 7])
    for place, task in enumerate(tasks):
        assert all(need < place and tasks[need].seed == task.seed for need in task.needs)
    assert [task.seed for task in tasks if not task.needs] == [5, 7]  # the dense models
    assert len({task.name for task in tasks}) == len(tasks)


def test_two_times_are_two_budgets(tmp_path):
    budgets = (WITHIN, replace(WITHIN, milliseconds=5.0))
    tasks = tasks_of(plan_of(comparison(tmp_path, ["learned", "his"], budgets=budgets)), seeds=[0])
    chosen = [(task.method.name, task.budget.time) for task in tasks if task.stage is None and task.budget is not None]
    assert all(chosen.count((name, budget)) == 1 for name in ("learned", "his") for budget in budgets)


def test_every_row_of_the_tables_is_a_task(tmp_path):
    asked = comparison(tmp_path, ["learned", "his+swap", "dense+distil", "learned+refit"], stages=STAGES)
    rows = [(planned.method, planned.budget, stage) for planned in plan_of(asked) for stage in planned.stages]
    of_tasks = [(task.method, task.budget, task.stage) for task in tasks_of(plan_of(asked), [0]) if task.stage is not None]
    assert of_tasks == rows


def test_what_methods_share_is_made_before_they_need_it(tmp_path):
    """Gates that are learned for each budget by both relatives of a method, scores for all budgets, but nothing that nobody
    asked for: what +distil learns is learned with distillation alone."""
    tasks = tasks_of(plan_of(comparison(tmp_path, ["learned+swap", "learned+refit", "his", "learned+distil"])), [0])

    def of(name, budget):
        return [
            place
            for place, task in enumerate(tasks)
            if (task.method.name, task.budget, task.stage) == (name, Budget(budget, {}), None)
        ]

    for budget in (3, 2):
        (learned,), (swap,), (refit,), (distil,) = (of(f"learned{more}", budget) for more in ("", "+swap", "+refit", "+distil"))
        assert tasks[swap].needs == tasks[refit].needs == (learned,)
        assert tasks[distil].needs == tasks[learned].needs == (0,)
    assert [tasks[place].needs for place in of("his", 2)] == [(of("his", 3)[0],)]  # which scores for both


def test_the_dense_model_is_trained_on_before_its_cost_is_shared_out(tmp_path):
    tasks = tasks_of(plan_of(comparison(tmp_path, ["his"], budgets=(3,), stages=["retrained", AT_TOTAL_COST])), [0])
    places = {(task.method.name, task.stage): place for place, task in enumerate(tasks)}
    assert places["dense", AT_TOTAL_COST] in tasks[places["his", AT_TOTAL_COST]].needs
    assert places["dense", AT_TOTAL_COST] not in tasks[places["his", "retrained"]].needs


@pytest.mark.integration
@pytest.mark.parametrize("budget", [3, WITHIN], ids=str)
def test_after_the_tasks_nothing_is_left_to_do(tmp_path, monkeypatch, budget):
    """In any order that their needs allow, each on an opened comparison of its own, as in a process of its own."""
    names = ["learned+swap", "lambda", "his+rescale", "hies", "learned+refit"]
    asked = comparison(
        tmp_path,
        names,
        budgets=(budget,),
        stages=["post hoc", "retrained", AT_TOTAL_COST],
        finetune=0.5,
        prune=0.5,
        retrain=0.5,
    )
    waiting, done = list(enumerate(tasks_of(plan_of(asked), asked.seeds))), set()
    chance = random.Random(0)
    workers = [asked.of_seed(0), asked.of_seed(0)]
    while waiting:
        ready = [item for item in waiting if set(item[1].needs) <= done]
        place, task = chance.choice(ready)
        do(task, *chance.choice(workers))
        waiting.remove((place, task))
        done.add(place)

    monkeypatch.setattr(pl.Trainer, "fit", lambda *args, **more: pytest.fail("something is trained"))
    monkeypatch.setattr(ExperimentCache, "_make", lambda self, determined_by, make: pytest.fail(f"{determined_by} is made"))
    with progress.stage("comparison") as shown:
        rows = list(run_seed(*asked.of_seed(0), plan_of(asked), Results(), shown))
    assert len(rows) == 3 * (1 + len(names))
    assert uses_of(plan_of(asked)) == (False, True)
