"""Weights refitted to a mask, with the ridge whose model does best on the selection split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from training.config import RefitSearch
from training.runs import progress
from training.runs.cost import Cost, measured
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


def refitted_to_best_(subject: Subject, masks: Sequence[Tensor], dense: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """A run's own refit: weights are refitted to each of several masks, and those of the mask stay whose refit does best on the
    selection split, the first of equals.

    Args:
        subject, dense: as for :func:`best_refit_`.
        masks: 0/1 ``[gates]``.

    Returns:
        That mask; and as JSON how weights were refitted to it and, in ``others``, to the other masks.
    """
    search, start = RefitSearch(), copied_weights(subject)
    done = dict[tuple[float, ...], Refit]()
    best_gain, best, taken = -math.inf, start, masks[0]
    for mask in masks:
        if (values := tuple(mask.tolist())) in done:
            continue
        use_weights_(subject, start)
        done[values] = best_refit_(subject, mask, search, dense)
        if (gain := max(map(subject.task.gain, done[values].tried))) > best_gain:
            best_gain, best, taken = gain, copied_weights(subject), mask
    use_weights_(subject, best)
    plain = {values: one.as_plain(search) for values, one in done.items()}
    own = plain.pop(tuple(taken.tolist()))
    return taken, own | {"others": [{"mask": list(values), **one} for values, one in plain.items()]}


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
