"""How long a command takes on a CPU, from the time of two batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from training.comparison.experiments import Experiments
from training.comparison.plan import PlanEntry
from training.config import PrunerOptions, RefitOptions
from training.config.comparison import RETRAINED, is_post_hoc
from training.data.base import TaskData
from training.data.translation import TranslationData
from training.scoring.scorers import SCORERS
from training.scoring.subject import ScoringContext
from training.stats.numbers import duration

BACKWARD = 2.0
"""The time of a backward pass in forward passes."""
REFIT = 3.0
"""The time of a refit in forward passes over its rows, this many in the trainer's precision and as many in single precision.
Measured on MiniLM."""
MUCH_FASTER = 1.5
"""The ratio of speeds from which on a lower precision is named."""
ROW = 1.0
"""The seconds of an evaluation without its passes."""
EXPORT = 15.0
"""The seconds of an export with its latency, which has a time limit for each batch size."""
MAX_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class Speed:
    """The seconds of a forward pass over a batch of the selection split.

    Args:
        batch: In the trainer's precision.
        single: In single precision, as scores and analyses compute.
        half: In bfloat16.
        examples: The number of examples in the batch.
    """

    batch: float
    single: float
    half: float
    examples: int


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


def estimate(
    experiments: Experiments,
    plan: Sequence[PlanEntry],
    *,
    seeds: int = 1,
    points: int = 0,
    refits: int = 0,
    exports: bool = False,
) -> str:
    """Return in a sentence how long a run or a comparison takes; empty if that is unknown.

    It is known on one CPU, for models whose batches take seconds at most and that do not generate texts. It is unknown where
    experiments are stored already.

    Args:
        experiments: The experiments of the first seed.
        points: The number of evaluations on the selection split that are not in the plan.
        refits: The number of refits that are not in the plan.
        exports: Whether a model is exported at the end.
    """
    if experiments.cache.holds_any():
        return ""
    subject = ScoringContext(experiments.pruner, experiments.data, experiments.trainer())
    if (speed := speed_of(subject)) is None:
        return ""
    pieces = pieces_of(speed, subject, experiments.options)
    of_plan = seconds_of(pieces, plan, trains=experiments.options.trains_with_mask)
    whole = seeds * (of_plan + points * pieces.select + refits * pieces.refit) + exports * EXPORT
    searches = ("restarts", "draws", "swap")
    without = ", without searches" if any(entry.method.modifiers & set(searches) for entry in plan) else ""
    faster = "; --trainer.precision bf16-mixed is faster here" if speed.batch > MUCH_FASTER * speed.half else ""
    return f"{expected(whole)}{without}{faster}"


def expected(seconds: float) -> str:
    """Return an expected time in words."""
    return f"about {duration(seconds)} on this machine"


def speed_of(subject: ScoringContext) -> Speed | None:
    """Return the speed of a model on this machine; None if it is unknown."""
    size = sum(parameter.numel() for parameter in subject.backbone.parameters())
    alone = subject.device.type == "cpu" and subject.trainer.world_size == 1
    if not alone or size > MAX_PARAMETERS or isinstance(subject.data, TranslationData):
        return None
    with torch.random.fork_rng([]):  # loaders draw seeds
        batch = next(iter(subject.data.val_dataloader()))
        single, half = (_forward(subject, batch, half=half) for half in (False, True))
    return Speed(half if _is_half(subject) else single, single, half, len(batch["labels"]))


def pieces_of(speed: Speed, subject: ScoringContext, options: PrunerOptions) -> Pieces:
    """Return the seconds of the pieces of an experiment, whose training steps have the time of a further batch."""
    data = subject.data
    with torch.random.fork_rng([]):
        step = (1 + BACKWARD) * _forward(subject, next(iter(data.train_dataloader())), half=_is_half(subject))
        select, test = (speed.batch * len(loader) for loader in (data.val_dataloader(), data.test_dataloader()))
        finetune, prune, retrain = (
            step * len(data.batches_of_run(epochs=epochs, first=0, rank=0, world=1)) if epochs else 0.0
            for epochs in (options.finetune, options.prune, options.retrain)
        )
    return Pieces(
        finetune=finetune,
        prune=prune,
        retrain=retrain,
        select=select,
        test=test,
        refit=refit_seconds(speed, data),
        score=score_seconds(speed, data),
    )


def score_seconds(speed: Speed, data: TaskData) -> float:
    """Return the seconds of a score with a backward pass."""
    rows = min(data.options.score_rows, data.splits["train"].num_rows)
    return (1 + BACKWARD) * speed.single / speed.examples * rows


def refit_seconds(speed: Speed, data: TaskData) -> float:
    """Return the seconds of a refit with its two passes over the selection split."""
    rows = min(RefitOptions().rows, data.splits["train"].num_rows)
    return REFIT * (speed.batch + speed.single) / speed.examples * rows + 2 * speed.batch * len(data.val_dataloader())


def seconds_of(pieces: Pieces, plan: Sequence[PlanEntry], *, trains: bool) -> float:
    """Return the seconds of a plan. Methods share the dense model, scores, trained gates and refits.

    Args:
        trains: Whether the stage ``retrained`` trains weights.
    """
    seconds, shared = pieces.finetune + pieces.select, dict[tuple[object, ...], float]()
    for entry in plan:
        method, budget = entry.method, repr(entry.budget)
        if method.is_learned:
            shared["gates", method.base, "distil" in method.modifiers, budget] = pieces.prune
        elif method.base != "dense":
            for raw in SCORERS[method.base].raws if method.base in SCORERS else (method.base,):
                shared["score", raw] = pieces.score / (1 + BACKWARD if raw == "entropy" else 1)  # no backward pass
        if "refit" in method.modifiers:
            shared["refit", method, budget] = pieces.refit
        passes = ROW + pieces.select + pieces.test
        for stage in entry.stages:
            seconds += passes
            if is_post_hoc(stage) or (stage == RETRAINED and not trains):
                continue
            took_steps = stage == RETRAINED and method.is_learned  # of the prune phase, for its gates
            seconds += pieces.retrain if took_steps else pieces.prune + pieces.retrain
    return seconds + sum(shared.values())


def _is_half(subject: ScoringContext) -> bool:
    return subject.trainer.precision == "bf16-mixed"


def _forward(subject: ScoringContext, batch: Mapping[str, Any], *, half: bool) -> float:
    """Return the seconds of the second of two forward passes, which has no set-up; ``half`` runs it in bfloat16."""
    seconds = 0.0
    for _ in range(2):
        with subject.at_rest(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            start = perf_counter()
            subject.task.losses(subject.backbone, batch)
            seconds = perf_counter() - start
    return seconds
