"""How long a run takes on a CPU, from the time of two batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from training.comparison.experiments import Experiments
from training.comparison.methods import CHEAP_RIVALS, own_method
from training.comparison.plan import PlanEntry
from training.config import RefitOptions
from training.config.comparison import is_post_hoc
from training.data.translation import TranslationData
from training.scoring.subject import ScoringContext
from training.stats.numbers import duration

BACKWARD = 2.0
"""The time of a backward pass in forward passes."""
REFIT = 7.0
"""The time of a refit in forward passes over its rows; measured on MiniLM: 7.0 to 7.5."""
ROW = 1.0
"""The seconds of an evaluation without its passes."""
MAX_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class Pieces:
    """The seconds of the pieces of an experiment: the phases of a training, a pass over a split, a refit, and a score."""

    finetune: float
    prune: float
    retrain: float
    select: float
    test: float
    refit: float
    score: float


def estimate(experiments: Experiments, plan: Sequence[PlanEntry]) -> str:
    """Return in a sentence how long the training and the comparison of a run take; empty if that is unknown.

    It is known on one CPU, for models whose batches take seconds at most and that do not generate texts.
    """
    if (pieces := pieces_of(experiments)) is None:
        return ""
    training, comparison = seconds_of_run(pieces, experiments, plan)
    return f"about {duration(training)} of training and {duration(comparison)} of comparison on this machine"


def estimate_of_seeds(experiments: Experiments, plan: Sequence[PlanEntry], seeds: int) -> str:
    """Return in a sentence how long a comparison takes, if nothing of it is done yet; empty if that is unknown."""
    if (pieces := pieces_of(experiments)) is None:
        return ""
    whole = pieces.finetune + pieces.select + sum(_seconds_of(entry, pieces, learn=pieces.prune) for entry in plan)
    searches = ("restarts", "draws", "swap")
    without = ", without searches" if any(entry.method.modifiers & set(searches) for entry in plan) else ""
    return f"about {duration(whole * seeds)} on this machine{without}; what is stored already takes no time"


def pieces_of(experiments: Experiments) -> Pieces | None:
    """Return the seconds of the pieces from the time of two batches; None if they are unknown."""
    subject = ScoringContext(experiments.pruner, experiments.data, experiments.trainer())
    size = sum(parameter.numel() for parameter in subject.backbone.parameters())
    alone = subject.device.type == "cpu" and subject.trainer.world_size == 1
    if not alone or size > MAX_PARAMETERS or isinstance(experiments.data, TranslationData):
        return None
    data, options = experiments.data, experiments.options
    with torch.random.fork_rng([]):  # loaders draw seeds
        step = (1 + BACKWARD) * _forward(subject, next(iter(data.train_dataloader())))
        batch = _forward(subject, next(iter(data.val_dataloader())))
        rows = batch / data.options.eval_batch_size
        select, test = (batch * len(loader) for loader in (data.val_dataloader(), data.test_dataloader()))
        finetune, prune, retrain = (
            step * len(data.batches_of_run(epochs=epochs, first=0, rank=0, world=1)) if epochs else 0.0
            for epochs in (options.finetune, options.prune, options.retrain)
        )
    available = data.splits["train"].num_rows
    return Pieces(
        finetune=finetune,
        prune=prune,
        retrain=retrain,
        select=select,
        test=test,
        refit=REFIT * rows * min(RefitOptions().rows, available) + 2 * select,
        score=(1 + BACKWARD) * rows * min(data.options.score_rows, available),
    )


def seconds_of_run(pieces: Pieces, experiments: Experiments, plan: Sequence[PlanEntry]) -> tuple[float, float]:
    """Return the seconds of training, with the choice of heads, and of the comparison."""
    options, setup = experiments.options, experiments.setup
    training = pieces.finetune + pieces.prune + pieces.retrain + pieces.select * options.epochs + pieces.select + pieces.test
    if setup.model.refits:
        known = 1 + len(CHEAP_RIVALS) if options.keep == "best" else 1
        training += known * pieces.refit + (known - 1) * pieces.score
    others = [entry for entry in plan if entry.method != own_method(setup.model)]  # which is trained before the comparison
    found = {"obs", "his"} if setup.model.refits and options.keep == "best" else set()
    comparison = sum(_seconds_of(entry, pieces, found=found) for entry in others)
    points = len(setup.end.curve) * len(others) if setup.end.compare != "none" else 0
    return training, comparison + ROW + pieces.select + pieces.test + pieces.select * points


def _seconds_of(entry: PlanEntry, pieces: Pieces, *, learn: float = 0.0, found: Collection[str] = ()) -> float:
    """Return the seconds of one method at one budget.

    Args:
        learn: The seconds in which gates are learned; 0 if they are there.
        found: The scores whose heads are known, refitted and not.
    """
    method, seconds = entry.method, 0.0
    if method.is_learned:
        seconds += learn
    elif method.base not in ("dense", "random", *found):
        seconds += pieces.score
    if "refit" in method.modifiers and method.base not in found and (learn or not method.is_learned):
        seconds += pieces.refit
    passes = ROW + pieces.select + pieces.test
    return seconds + sum(passes + (0.0 if is_post_hoc(stage) else pieces.retrain) for stage in entry.stages)


def _forward(subject: ScoringContext, batch: Mapping[str, Any]) -> float:
    """Return the seconds of the second of two forward passes, which has no set-up."""
    seconds = 0.0
    for _ in range(2):
        with subject.at_rest(), torch.no_grad():
            start = perf_counter()
            subject.task.losses(subject.backbone, batch)
            seconds = perf_counter() - start
    return seconds
