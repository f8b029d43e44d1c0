"""How long a run takes on a CPU, from the time of two batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from training.comparison.experiments import Experiments
from training.comparison.methods import CHEAP_RIVALS, own_method
from training.comparison.plan import PlanEntry
from training.config import RefitSearch
from training.config.comparison import POST_HOC
from training.data.translation import TranslationData
from training.scoring.subject import ScoringContext
from training.stats.numbers import duration

BACKWARD = 2.0
"""The time of a backward pass in forward passes."""
REFIT = 4.0
"""The time of a refit in forward passes over its rows; measured on MiniLM: 3.6."""
ROW = 1.0
"""The seconds of an evaluation without its passes."""
MAX_PARAMETERS = 500_000_000


def estimate(experiments: Experiments, plan: Sequence[PlanEntry]) -> str:
    """Return in a sentence how long the training and the comparison of a run take; empty if that is unknown.

    It is known on one CPU, for models whose batches take seconds at most and that do not generate texts.

    Args:
        experiments: The experiments of the run.
        plan: The plan of its comparison.
    """
    subject = ScoringContext(experiments.pruner, experiments.data, experiments.trainer())
    size = sum(parameter.numel() for parameter in subject.backbone.parameters())
    alone = subject.device.type == "cpu" and subject.trainer.world_size == 1
    if not alone or size > MAX_PARAMETERS or isinstance(experiments.data, TranslationData):
        return ""
    with torch.random.fork_rng([]):  # loaders draw seeds
        training, comparison = seconds_of_run(subject, experiments, plan)
    return f"about {duration(training)} of training and {duration(comparison)} of comparison on this machine"


def seconds_of_run(subject: ScoringContext, experiments: Experiments, plan: Sequence[PlanEntry]) -> tuple[float, float]:
    """Return the seconds of training, with the choice of heads, and of the comparison."""
    data, options, setup = experiments.data, experiments.options, experiments.setup
    step = (1 + BACKWARD) * _forward(subject, next(iter(data.train_dataloader())))
    batch = _forward(subject, next(iter(data.val_dataloader())))
    rows = batch / data.options.eval_batch_size
    select, test = (batch * len(loader) for loader in (data.val_dataloader(), data.test_dataloader()))
    steps = {
        phase: step * len(data.batches_of_run(epochs=epochs, first=0, rank=0, world=1)) if epochs else 0.0
        for phase, epochs in (("finetune", options.finetune), ("prune", options.prune), ("retrain", options.retrain))
    }
    available = data.splits["train"].num_rows
    search = RefitSearch()
    refit = REFIT * rows * min(search.rows, available) + select
    score = (1 + BACKWARD) * rows * min(data.options.score_rows, available)
    training = sum(steps.values()) + select * options.epochs + select + test
    known = 0
    if setup.model.refits:
        known = 1 + len(CHEAP_RIVALS) if options.keep == "best" else 1
        training += known * refit + (known - 1) * score
    own = own_method(setup.model)  # trained before the comparison
    others = [entry for entry in plan if entry.method != own]
    comparison = sum(_seconds_of(entry, steps["retrain"], refit=refit, score=score, rows=select + test) for entry in others)
    points = len(setup.end.curve) * len(others) if setup.end.compare != "none" else 0
    return training, comparison + ROW + select + test + select * points


def _seconds_of(entry: PlanEntry, retrain: float, *, refit: float, score: float, rows: float) -> float:
    is_new = entry.method.name == "random+refit"  # the run has refitted to the others
    finding = refit if is_new else 0.0 if entry.method.is_learned or entry.method.modifiers else score
    return finding + sum(ROW + rows + (0.0 if stage == POST_HOC else retrain) for stage in entry.stages)


def _forward(subject: ScoringContext, batch: Mapping[str, Any]) -> float:
    """Return the seconds of the second of two forward passes, which has no set-up."""
    seconds = 0.0
    for _ in range(2):
        with subject.at_rest(), torch.no_grad():
            start = perf_counter()
            subject.task.losses(subject.backbone, batch)
            seconds = perf_counter() - start
    return seconds
