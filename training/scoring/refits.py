"""Weights refitted to a mask, with the ridge whose model does best on the selection split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from training.config import RefitSearch, RestartSearch
from training.runs import progress
from training.runs.cost import Cost, measured
from training.scoring.mask_search import calibration
from training.scoring.outputs import refit
from training.scoring.subject import Subject


@dataclass(frozen=True)
class Refit:
    """How weights were refitted to a mask.

    Args:
        ridge: that did best.
        tried: the main metric on the selection split with each ridge.
        cost: of all of them.
    """

    ridge: float
    tried: list[float]
    cost: Cost

    def as_plain(self, search: RefitSearch) -> dict[str, Any]:
        """As JSON, with what was searched."""
        return {"search": asdict(search), "ridge": self.ridge, "tried": self.tried, **self.cost.as_row()}


def best_refit_(subject: Subject, mask: Tensor, search: RefitSearch, dense: Mapping[str, Tensor]) -> Refit:
    """Refit weights with every ridge, and leave those of the best, the first of equals.

    Args:
        subject: with the weights to refit, which are changed.
        mask: 0/1 ``[gates]``.
        search: the ridges, and what they are fitted on.
        dense: parameters of the dense model by their names in the subject's, which are the aim.
    """
    tried, best = list[float](), dict[str, Tensor]()
    start, gain = copied_weights(subject), subject.task.gain
    with measured(subject.device, subject.gates) as cost, progress.stage("refitting", len(search.ridges)) as shown:
        for ridge in search.ridges:
            use_weights_(subject, start)
            refit(subject, mask, dense, ridge=ridge, rows=search.rows, feed_forward=search.feed_forward)
            found = quality(subject, mask)
            if not tried or gain(found) > max(map(gain, tried)):
                best = copied_weights(subject)
            tried.append(found)
            shown.advance()
    use_weights_(subject, best)
    return Refit(search.ridges[tried.index(max(tried, key=gain))], tried, cost.cost)


def quality(subject: Subject, mask: Tensor) -> float:
    """The main metric on the selection split with a mask ``[gates]``, of all processes together."""
    loader, limit = subject.data.val_dataloader(), subject.trainer.limit_val_batches
    batches = limit if isinstance(limit, int) else int(limit * len(loader))
    metrics = subject.task.metrics("select").to(subject.device)
    with subject.at_rest(), subject.gates.use(mask.to(subject.device)), torch.no_grad():
        for batch in islice(subject.on_device(loader, "selection split", bar=False), batches):
            _, logits = subject.task.losses(subject.backbone, batch)
            subject.task.update(metrics, subject.backbone, batch, logits)
    return float(metrics.compute()[subject.task.main_metric])


def copied_weights(subject: Subject) -> dict[str, Tensor]:
    """The subject's parameters by name, as copies on the CPU."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in subject.backbone.named_parameters()}


def use_weights_(subject: Subject, weights: Mapping[str, Tensor]) -> None:
    """Put what :func:`copied_weights` has kept back in place."""
    for name, parameter in subject.backbone.named_parameters():
        parameter.data.copy_(weights[name])


def losses_behind_refits(
    subject: Subject, masks: Sequence[Tensor], dense: Mapping[str, Tensor], search: RestartSearch, refits: RefitSearch | None
) -> list[float]:
    """The mean loss with each mask on training data that neither scored the heads nor trains anything.

    Args:
        subject: with the weights that the masks are for; they are as before in the end.
        masks: 0/1 ``[gates]``.
        dense: parameters of the dense model by their names in the subject's, the aim of the refits.
        search: says how many rows, and the ridge.
        refits: what is refitted to each mask before its loss is taken; None for the weights as they are.
    """
    start, losses = copied_weights(subject), dict[tuple[float, ...], float]()
    different = {tuple(mask.tolist()): mask for mask in masks}  # the same heads are often found again
    with progress.stage("judging masks", len(different)) as shown:
        for values, mask in different.items():
            if refits is not None:
                use_weights_(subject, start)
                refit(subject, mask, dense, ridge=search.ridge, rows=refits.rows, feed_forward=refits.feed_forward)
            with calibration(subject, search.rows) as found:
                losses[values] = found.loss(mask.to(subject.device), 1.0, found.deciding)
            shown.advance()
    use_weights_(subject, start)
    return [losses[tuple(mask.tolist())] for mask in masks]
