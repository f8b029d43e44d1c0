"""One run: set up, train, compare, write the run directory. Reads top to bottom."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import yaml
from pytorch_lightning.loggers import CSVLogger

from gates.budget import Budget
from gates.errors import GateError
from training.cli.ending import advised, stdout
from training.cli.line import CommandLine
from training.comparison.adoption import adopt, is_adopted, seconds_of
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments
from training.comparison.given_mask import check_given_masks
from training.comparison.identity import began_with, identity_of_dense
from training.comparison.in_time import achieved, keep_table, timed
from training.comparison.methods import Method, own_method
from training.comparison.plan import Planned, curve_of_run, plan_of_run, run_seed
from training.comparison.run_results import describe_run, export, show_run, write_run
from training.comparison.selection import MaskSelector
from training.comparison.tables import Results, score_columns, write_tables
from training.comparison.to_wandb import send_run
from training.comparison.training import check_own_checkpoints, restore, train
from training.comparison.translations import save_translations
from training.comparison.weights import learned_result
from training.config import Setup, SwapSearch
from training.data.base import TaskData
from training.pruner.checkpoints import check_checkpoint
from training.pruner.evaluation import evaluate
from training.pruner.module import HeadPruner
from training.runs import processes, progress
from training.runs.finished import is_finished, mark_finished, unmark_finished
from training.runs.resuming import check_same_inputs, check_same_options, checkpoint_of, identity_of, note_inputs
from training.runs.run_directory import RunDirectory, claimed
from training.runs.tracking import lost_in_wandb, make_logger, reachable
from training.setup import make_pruner, make_trainer, open_data, quiet_libraries, start_launched


def fit(line: CommandLine) -> RunDirectory:
    """The whole run, as its command line says; one that has ended and is resumed is left as it is."""
    quiet_libraries()
    setup = Setup.of(line.options)
    own = own_method(setup.model)
    if setup.model.nothing_trains and setup.end.compare == "full" and setup.end.retrained != []:
        raise GateError(f"{setup.model.nothing_trains}, so nothing can be trained on; give --compare posthoc or --retrained []")
    if setup.model.nothing_trains and setup.model.retrain > 0:
        raise GateError(f"{setup.model.nothing_trains}, but retrain is {setup.model.retrain:g} epochs; set --model.retrain 0")
    asked = list(plan_of_run(own, None, setup.end))  # raises for names of no method
    if setup.end.from_scratch:
        setup.check_scratch()
    kept = line.options.clone()
    kept.existing = "refuse"  # of this call alone: a run that is started from the file replaces nothing unasked
    resolved = line.parser.dump(kept, skip_unset=False)
    start_launched(setup, resolved)
    with ExitStack() as held:
        run, first = processes.in_first(lambda: held.enter_context(claimed(setup.run)))
        first = first and processes.is_first()
        if run.resumes:
            check_same_options(run, resolved)
            if is_finished(run, resolved):
                if first:
                    stdout().print(
                        f"the run in {str(run.path)!r} is finished; nothing is to be resumed, and its data were not read",
                        soft_wrap=True,
                    )
                return run
        setup = replace(setup, wandb=processes.in_first(lambda: reachable(setup.wandb)))  # before there is anything to lose
        again = "" if setup.run.run_dir is not None else f"--run_dir {shlex.quote(str(run.path))} "
        with advised(lambda: f"go on with {again}--existing resume" if run.holds(resolved) else None):
            train_and_compare(line, setup, own, asked, run, resolved, first=first)
    return run


def prepare(
    setup: Setup, run: RunDirectory, pruner: HeadPruner, data: TaskData, resolved: str, *, world_size: int, first: bool
) -> None:
    """Check what a resumed run finds in its directory, or create the directory.

    Args:
        setup: The options of the run.
        run: The directory.
        pruner: The built module.
        data: The built data.
        resolved: All options, as YAML.
        world_size: The number of processes that train.
        first: Whether this is the first of the processes that share the directory.
    """
    if run.resumes:
        began = began_with(setup, identity_of_dense(setup, pruner, data, processes=world_size))
        check_same_inputs(run, began)
        check_own_checkpoints(run, identity_of(began))
    processes.wait_for_all()  # the others may still read what lies there
    if first:
        unmark_finished(run)
        run.create(resolved)
        keep_table([setup.model.budget], run)
        data.write_files(run.path)


def train_and_compare(
    line: CommandLine, setup: Setup, own: Method, asked: Sequence[Planned], run: RunDirectory, resolved: str, *, first: bool
) -> None:
    """The run in its directory.

    Args:
        line: that asks for it.
        setup: of the run.
        own: its method.
        asked: what it is compared with.
        run: to write into.
        resolved: its whole configuration, as YAML.
        first: whether this is the first of the processes that share the directory.
    """
    checkpoint = checkpoint_of(setup.run, run, first)
    data = open_data(setup, checkpoint)
    setup = timed(setup, run, data)
    pruner = make_pruner(setup, data)
    budget = pruner.steering.budget
    if budget is not None:  # 0.25 and 18 of 72 heads are the same budget
        canonical: dict[str, Any] = {"budget": budget.option(pruner.gates.kind_sizes())}
        setup = replace(setup, model=replace(setup.model, **canonical))
    check_given_masks([planned.method for planned in asked], pruner.gates, [budget or Budget(1, {})])
    if checkpoint is not None:
        check_checkpoint(checkpoint, pruner)
    trainer = make_trainer(setup)  # raises for its settings before anything is written
    prepare(setup, run, pruner, data, resolved, world_size=trainer.world_size, first=first)
    processes.start(trainer)
    # Now, since experiments are known by the weights that training starts from.
    experiments = Experiments(setup, data, cache=ExperimentCache(run.path / "experiments"), pruner=pruner)
    began = began_with(setup, experiments.dense_is)
    processes.in_first(lambda: note_inputs(run, began))
    wandb_logger = make_logger(setup.wandb, run.path, yaml.safe_load(resolved))

    if run.resumes and restore(run, pruner) and is_adopted(experiments, pruner):
        metrics = evaluate(trainer, pruner, data)
    else:
        loggers = [CSVLogger(run.path, name="", version=""), *([wandb_logger] if wandb_logger else [])]
        trained = train(setup, run, pruner, data, loggers, checkpoint, identity=identity_of(began))
        adopt(experiments, pruner, trained)
        metrics = dict(trained.metrics)
    seconds, learned = seconds_of(experiments, pruner), learned_result(pruner)  # now, while the module is in its final state
    processes.in_first(lambda: export(run, pruner, data, metrics))
    latency = achieved(setup, pruner, data)

    mask = pruner.gates.mask.detach().cpu().clone()
    budget = pruner.steering.budget_of(mask)
    swaps = SwapSearch(passes=setup.model.swaps) if setup.model.swaps else SwapSearch()
    selector = MaskSelector(experiments, [budget.option(pruner.gates.kind_sizes())], swaps=swaps, as_configured=own.base)
    plan, results = list(plan_of_run(own, budget, setup.end)), Results(pruner=pruner, data=data, budgets=[budget])
    compares = setup.end.compare != "none"
    with progress.stage("comparison", sum(len(planned.stages) for planned in plan)) as shown:
        results.rows += run_seed(experiments, selector, plan, results, shown)
    curve = list(curve_of_run(experiments, selector, own, setup.end.curve if compares else [], results))
    methods = [planned.method for planned in plan]
    if compares:
        results.scores.append(score_columns(experiments, selector, results.rankings))
    if processes.is_first():
        described = describe_run(results, own, mask, learned, seconds=seconds, wandb_mode=setup.wandb.mode)
        described |= {} if latency is None else {"latency": latency}
        run.withdraw()
        run.join_logs()
        write_run(run, results, own, curve)
        save_translations(run, results)
        name, seeds, more = setup.run.name, [setup.run.seed], {"run": described}
        write_tables(run, results, name=name, methods=methods, seeds=seeds, command=line.command, more=more)
        show_run(stdout(), run, results, described, own)
        mark_finished(run)
        if wandb_logger is not None:
            with lost_in_wandb():  # last, so that nothing else is lost
                send_run(wandb_logger, run, results, described)
