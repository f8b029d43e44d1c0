"""``python -m training.fit``: learn which heads to keep, compare, export.

Reads top to bottom: parse the command line, set up, train, compare, write the run directory.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import ArgumentParser, Namespace
from pytorch_lightning.loggers import CSVLogger

from gates.errors import GateError
from training.cli import finish, stdout, with_config
from training.comparison.adoption import TrainedRun, adopt, is_adopted
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments, read_weights
from training.comparison.methods import own_method
from training.comparison.plan import curve_of_run, plan_of_run, run_seed
from training.comparison.run_results import describe_run, export, send_run, show_run, write_run
from training.comparison.selection import MaskSelector
from training.comparison.tables import Results, score_columns, write_tables
from training.comparison.translations import save_translations
from training.config import RunOptions
from training.data.base import TaskData
from training.pruner.averaging import StopEarly
from training.pruner.callbacks import DenseCheckpoint, LastGoodCheckpoint, PhaseCosts, Predictions
from training.pruner.checkpoints import check_checkpoint
from training.pruner.evaluation import evaluate
from training.pruner.gate_log import GateLog, OpenHeadsBar
from training.pruner.module import HeadPruner
from training.runs import processes
from training.runs.progress import comparison_progress
from training.runs.run_directory import RunDirectory
from training.scoring.mask_search import SwapSearch
from training.setup import Setup, build_parser, draws_bars, make_pruner, make_trainer, open_data, quiet_libraries

RUN_DIR_OF_FIRST = "HEAD_GATES_RUN_DIR"
"""Environment variable by which the first process tells those that Lightning starts where it writes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for input that its user can mend."""
    quiet_libraries()
    parser = build_parser(description=__doc__)
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = "python -m training.fit " + shlex.join(given)
    return finish(
        lambda: parser.parse_args(with_config(given)),
        lambda config: fit(parser, config, command),
        when_stopped="go on with --existing resume",
    )


def fit(parser: ArgumentParser, config: Namespace, command: str) -> RunDirectory:
    """The whole run."""
    setup = Setup.of(config)
    own = own_method(setup.model)
    list(plan_of_run(own, setup.model.budget or 1, setup.end))  # raises for names of no method
    if setup.end.from_scratch:
        setup.check_scratch()
    run, first = claim(setup.run)
    checkpoint = checkpoint_of(setup.run, run, first)
    data = open_data(setup, checkpoint)
    pruner = make_pruner(setup, data)
    if checkpoint is not None:
        check_checkpoint(checkpoint, pruner)
    trainer = make_trainer(setup)  # raises for its settings before anything is written
    resolved = parser.dump(config, skip_unset=False)
    if first:
        run.create(resolved)
        data.write_files(run.path)
    processes.start(trainer)
    experiments = Experiments(
        setup, data, cache=ExperimentCache(run.path / "experiments"), pruner=pruner
    )  # knows first weights
    wandb_logger = setup.wandb.make_logger(run.path, yaml.safe_load(resolved))
    loggers = [CSVLogger(run.path, name="", version=""), *([wandb_logger] if wandb_logger else [])]

    start = time.perf_counter()
    finished = run.resumes and restore(run, pruner) and is_adopted(experiments, pruner)
    trained = None if finished else train(setup, run, pruner, data, loggers, checkpoint)
    seconds = time.perf_counter() - start
    metrics = evaluate(make_trainer(setup), pruner, data) if trained is None else dict(trained.metrics)
    if trained is not None:
        adopt(experiments, pruner, trained)
    if processes.is_first():
        export(run, pruner, data, metrics)

    results, mask = Results(pruner=pruner, data=data), pruner.gates.mask.detach().cpu().clone()
    budget = pruner.steering.budget_option(mask)
    selector = MaskSelector(experiments, [budget], swaps=SwapSearch(passes=setup.model.swaps or 40.0), as_configured=own.base)
    plan = list(plan_of_run(own, budget, setup.end))
    fractions = setup.end.curve if setup.end.compare != "none" else []
    count = sum(len(planned.stages) for planned in plan)
    with comparison_progress(count, visible=draws_bars(setup) and processes.is_first()) as experiments.progress:
        results.rows += run_seed(experiments, selector, plan, results)
        curve = list(curve_of_run(experiments, selector, own, fractions, results))
    methods = [planned.method for planned in plan]
    if setup.end.compare != "none":
        results.scores.append(score_columns(experiments, selector, methods, results.rankings))
    if processes.is_first():
        described = describe_run(results, own, mask, seconds=seconds, wandb_mode=setup.wandb.resolved_mode())
        run.join_logs()
        write_run(run, results, own, curve)
        save_translations(run, results)
        write_tables(
            run,
            results,
            name=setup.run.name,
            methods=methods,
            budgets=[budget],
            seeds=[setup.run.seed],
            command=command,
            more={"run": described},
        )
        if wandb_logger is not None:
            send_run(wandb_logger, run, results, described)
        show_run(stdout(), run, results, described, own)
    return run


def claim(options: RunOptions) -> tuple[RunDirectory, bool]:
    """The run directory, and whether this is the first of the processes that share it."""
    if int(os.environ.get("LOCAL_RANK", 0)) == int(os.environ.get("RANK", 0)) == 0:
        name = options.name
        if "WANDB_SWEEP_ID" in os.environ and "WANDB_RUN_ID" in os.environ:  # agents start together
            name = f"{name}-{os.environ['WANDB_RUN_ID']}"
        run = RunDirectory.claim(options.run_dir, name, options.existing)
        os.environ[RUN_DIR_OF_FIRST] = str(run.path)
        return run, True
    if RUN_DIR_OF_FIRST not in os.environ and options.run_dir is None:
        raise GateError("started by torchrun or a cluster, all processes need the same --run_dir; give one")
    path = os.environ.get(RUN_DIR_OF_FIRST) or options.run_dir
    return RunDirectory.of_other_process(path, options.name, options.existing), False


def checkpoint_of(options: RunOptions, run: RunDirectory, first: bool) -> str | None:
    """The checkpoint that a run goes on from; None for one that begins.

    Raises:
        GateError: for one that would be overwritten.
    """
    path = options.ckpt_path or (str(run.checkpoint("last")) if run.resumes else None)
    if path is not None and first and not run.resumes and run.path.resolve() in Path(path).resolve().parents:
        raise GateError(f"--ckpt_path {path!r} lies in the run that would be overwritten; give another --run_dir")
    return path


def train(
    setup: Setup, run: RunDirectory, pruner: HeadPruner, data: TaskData, loggers: list[Any], checkpoint: str | None
) -> TrainedRun:
    """All phases in one go, and the evaluation of what they end with."""
    weights, interval = setup.weights, setup.trainer["val_check_interval"] or data.validation_interval(pruner.epochs)
    gate_log, costs, dense = GateLog(), PhaseCosts(), DenseCheckpoint(run.checkpoint("dense"), checkpoint)
    callbacks: list[pl.Callback] = [gate_log, costs, dense]
    if weights.patience is not None:
        callbacks.insert(0, StopEarly(pruner.task.main_metric, weights.patience))
    callbacks.append(LastGoodCheckpoint(run.checkpoint("last"), every=setup.run.save_every))
    if draws_bars(setup):
        callbacks.append(OpenHeadsBar())
    trainer = make_trainer(setup, *callbacks, logger=loggers, val_check_interval=interval)
    trainer.fit(pruner, data, ckpt_path=checkpoint, weights_only=True)
    trainer.save_checkpoint(run.checkpoint("final"), weights_only=True)
    finetune, prune, end = pruner.boundaries
    predictions = Predictions()
    metrics = evaluate(make_trainer(setup, predictions), pruner, data)
    table = gate_log.table(pruner)
    return TrainedRun(
        dense=run.checkpoint("dense"),
        costs=costs.costs,
        steps={"finetune": min(finetune, trainer.global_step), "prune": prune - finetune, "retrain": end - prune},
        gates=table[(table["step"] > finetune) & (table["step"] <= prune)],
        metrics=metrics,
        predictions=predictions,
    )


def restore(run: RunDirectory, pruner: HeadPruner) -> bool:
    """Bring the module into the final state of a run whose training has ended; False if it has not."""
    final = run.checkpoint("final")
    if not final.is_file():
        return False
    pruner.load_state_dict(read_weights(final))
    return True


if __name__ == "__main__":
    sys.exit(main())
