"""Weights refitted to a mask, with the ridge whose model does best on the selection split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from torch import Tensor

from training.config import RefitSearch
from training.runs import progress
from training.runs.cost import Cost, measured
from training.scoring.passes import refit
from training.scoring.subject import ScoringContext


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

    def as_plain(self, search: RefitSearch) -> dict[str, Any]:
        """Return JSON with the options of the search."""
        return {"search": asdict(search), **self.as_result()}

    def as_result(self) -> dict[str, Any]:
        """Return the JSON of an experiment."""
        return {"ridge": self.ridge, "tried": self.tried, "unrefitted": self.unrefitted, **self.cost.as_row()}


def best_refit_(subject: ScoringContext, mask: Tensor, search: RefitSearch, dense: Mapping[str, Tensor]) -> Refit:
    """Refit weights with every ridge, and keep those of the best one, the first of equals.

    The weights stay where every refit does worse on the selection split than the mask alone.

    Args:
        subject: The model with the weights to refit. They are changed.
        mask: 0/1 ``[gates]``.
        search: The ridges and the data to fit on.
        dense: The parameters of the dense model by name, whose outputs are the aim.
    """
    (only,) = best_refits_(subject, [mask], search, dense)
    return only


def best_refits_(
    subject: ScoringContext, masks: Sequence[Tensor], search: RefitSearch, dense: Mapping[str, Tensor]
) -> list[Refit]:
    """Refit for each mask, keep the weights of the best one, and return the result of each mask."""
    start = copied_weights(subject)
    done, best, best_gain = list[Refit](), start, -math.inf

    def gain(quality: float) -> float:
        return -math.inf if math.isnan(quality) else subject.task.gain(quality)

    for mask in masks:
        tried = list[float]()
        with measured(subject.device, subject.gates) as cost, progress.stage("refitting", len(search.ridges)) as shown:
            use_weights_(subject, start)
            unrefitted = quality(subject, mask)
            for ridge in search.ridges:
                use_weights_(subject, start)
                refit(subject, mask, dense, ridge=ridge, rows=search.rows, feed_forward=search.feed_forward)
                tried.append(quality(subject, mask))
                if gain(tried[-1]) >= gain(unrefitted) and gain(tried[-1]) > best_gain:
                    best, best_gain = copied_weights(subject), gain(tried[-1])
                shown.advance()
        reached = max(tried, key=gain)
        taken: float | None = search.ridges[tried.index(reached)]
        if gain(reached) < gain(unrefitted) or gain(reached) == -math.inf:
            _say(
                f"{subject.task.main_metric} on the selection split is {unrefitted:.4f} with the mask of {int(mask.sum())} "
                f"alone and {reached:.4f} after the best refit, so the weights stay as they were"
            )
            taken, reached = None, unrefitted
            if gain(unrefitted) > best_gain:
                best, best_gain = start, gain(unrefitted)
        done.append(Refit(taken, reached, tried, unrefitted, cost.cost))
    use_weights_(subject, best)
    return done


def refitted_to_best_(
    subject: ScoringContext, masks: Sequence[Tensor], dense: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Refit weights to several masks, and keep the weights of the best one on the selection split, the first of equals.

    Args:
        subject, dense: See :func:`best_refit_`.
        masks: 0/1 ``[gates]``.

    Returns:
        The best mask, and the JSON of its refit, with the refits of the other masks under ``others``.
    """
    search, different = RefitSearch(), list({tuple(mask.tolist()): mask for mask in masks}.values())
    done = best_refits_(subject, different, search, dense)
    gains = [subject.task.gain(one.reached) for one in done]
    plain = [one.as_plain(search) | {"mask": mask.tolist()} for mask, one in zip(different, done, strict=True)]
    own = plain.pop(taken := gains.index(max(gains)))
    return different[taken], own | {"others": plain}


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
