"""How long a run takes on a CPU, from the time of two batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from training.comparison.experiments import Experiments
from training.comparison.plan import PlanEntry
from training.config import RefitOptions
from training.config.comparison import RETRAINED, is_post_hoc
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
class Pieces:
    """The seconds of the pieces of an experiment: the phases of a training, a pass over a split, a refit, and a score.

    Args:
        in_bfloat16: How many times as fast a forward pass is in bfloat16 as in the trainer's precision.
    """

    finetune: float
    prune: float
    retrain: float
    select: float
    test: float
    refit: float
    score: float
    in_bfloat16: float


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
    if experiments.cache.holds_any() or (pieces := pieces_of(experiments)) is None:
        return ""
    planned = seconds_of(pieces, plan, trains=experiments.options.trains_with_mask)
    whole = seeds * (planned + points * pieces.select + refits * pieces.refit) + exports * EXPORT
    searches = ("restarts", "draws", "swap")
    without = ", without searches" if any(entry.method.modifiers & set(searches) for entry in plan) else ""
    faster = "; --trainer.precision bf16-mixed is faster here" if pieces.in_bfloat16 > MUCH_FASTER else ""
    return f"about {duration(whole)} on this machine{without}{faster}"


def pieces_of(experiments: Experiments) -> Pieces | None:
    """Return the seconds of the pieces from the time of two batches; None if they are unknown."""
    subject = ScoringContext(experiments.pruner, experiments.data, experiments.trainer())
    size = sum(parameter.numel() for parameter in subject.backbone.parameters())
    alone = subject.device.type == "cpu" and subject.trainer.world_size == 1
    if not alone or size > MAX_PARAMETERS or isinstance(experiments.data, TranslationData):
        return None
    data, options = experiments.data, experiments.options
    is_half = subject.trainer.precision == "bf16-mixed"
    with torch.random.fork_rng([]):  # loaders draw seeds
        step = (1 + BACKWARD) * _forward(subject, next(iter(data.train_dataloader())), half=is_half)
        evaluated = next(iter(data.val_dataloader()))
        single, half = (_forward(subject, evaluated, half=half) for half in (False, True))
        batch = half if is_half else single
        examples = len(evaluated["labels"])
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
        refit=REFIT * (batch + single) / examples * min(RefitOptions().rows, available) + 2 * select,
        score=(1 + BACKWARD) * single / examples * min(data.options.score_rows, available),
        in_bfloat16=batch / half,
    )


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


def _forward(subject: ScoringContext, batch: Mapping[str, Any], *, half: bool) -> float:
    """Return the seconds of the second of two forward passes, which has no set-up; ``half`` runs it in bfloat16."""
    seconds = 0.0
    for _ in range(2):
        with subject.at_rest(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
            start = perf_counter()
            subject.task.losses(subject.backbone, batch)
            seconds = perf_counter() - start
    return seconds
