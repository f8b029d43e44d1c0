"""Weights refitted to a mask, with the ridge whose model does best on the selection split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from torch import Tensor

from gates.errors import GateError
from training.config import RefitSearch
from training.runs import processes, progress
from training.runs.cost import Cost, measured
from training.scoring.passes import refit
from training.scoring.subject import ScoringContext


class RefitError(GateError):
    """Say why the weights of a model cannot be refitted: what it is built of, or no memory left for it."""


@dataclass(frozen=True)
class Refit:
    """The result of a refit.

    Args:
        ridge: The best ridge. None if the model is worse with every ridge, so that the weights stay.
        reached: The main metric on the selection split with it.
        tried: The metric with each ridge.
        unrefitted: The metric with the mask alone.
        cost: The cost of all of them.
    """

    ridge: float | None
    reached: float
    tried: list[float]
    unrefitted: float
    cost: Cost

    def as_result(self) -> dict[str, Any]:
        """Return the JSON of an experiment."""
        return {"ridge": self.ridge, "tried": self.tried, "unrefitted": self.unrefitted, **self.cost.as_row()}


def best_refit_(subject: ScoringContext, mask: Tensor, search: RefitSearch, dense: Mapping[str, Tensor]) -> Refit:
    """Refit weights with every ridge, keep those of the best one, the first of equals, and return how it went.

    The weights stay where every refit does worse on the selection split than the mask alone.

    Args:
        subject: The model with the weights to refit. They are changed.
        mask: 0/1 ``[gates]``.
        search: The ridges and the data to fit on.
        dense: The parameters of the dense model by name, whose outputs are the aim.

    Raises:
        RefitError: If this model cannot be refitted.
    """

    def gain(quality: float) -> float:
        return -math.inf if math.isnan(quality) else subject.task.gain(quality)

    start, tried = copied_weights(subject), list[float]()
    best, ridge = start, None
    with measured(subject.device, subject.gates) as cost, progress.stage("refitting", len(search.ridges)) as shown:
        unrefitted = reached = quality(subject, mask)
        for one in search.ridges:
            use_weights_(subject, start)
            try:
                refit(subject, mask, dense, ridge=one, rows=search.rows, feed_forward=search.feed_forward)
            except GateError as error:
                raise RefitError(str(error)) from error
            except torch.OutOfMemoryError as error:
                if processes.world_size() > 1:  # the others would wait for this one
                    raise
                raise RefitError(f"{subject.device} has too little memory for a refit on {search.rows} rows") from error
            tried.append(quality(subject, mask))
            is_better = gain(tried[-1]) > gain(reached) or (ridge is None and gain(tried[-1]) == gain(reached) > -math.inf)
            if is_better:
                best, ridge, reached = copied_weights(subject), one, tried[-1]
            shown.advance()
    if ridge is None:
        _say(
            f"{subject.task.main_metric} on the selection split is {unrefitted:.4f} with the mask of {int(mask.sum())} alone "
            f"and {max(tried, key=gain):.4f} after the best refit, so the weights stay as they were"
        )
    use_weights_(subject, best)
    return Refit(ridge, reached, tried, unrefitted, cost.cost)


def _say(notice: str) -> None:
    with progress.paused():
        rank_zero_only(Console().print)(notice, markup=False, highlight=False, soft_wrap=True)


def quality(subject: ScoringContext, mask: Tensor) -> float:
    """Return the main metric of all processes on the selection split with a mask ``[gates]``."""
    loader, limit = subject.data.val_dataloader(), subject.trainer.limit_val_batches
    batches = limit if isinstance(limit, int) else int(limit * len(loader))
    metrics = subject.task.metrics("select").to(subject.device)
    with subject.at_rest(), subject.gates.use(mask.to(subject.device)), torch.no_grad():
        for batch in islice(subject.on_device(loader, "selection split", bar=False), batches):
            _, logits = subject.task.losses(subject.backbone, batch)
            subject.task.update(metrics, subject.backbone, batch, logits)
    return float(metrics.compute()[subject.task.main_metric])


def copied_weights(subject: ScoringContext) -> dict[str, Tensor]:
    """Return copies of the parameters on the CPU, by name."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in subject.backbone.named_parameters()}


def use_weights_(subject: ScoringContext, weights: Mapping[str, Tensor]) -> None:
    """Restore the weights that :func:`copied_weights` returned."""
    for name, parameter in subject.backbone.named_parameters():
        parameter.data.copy_(weights[name])
