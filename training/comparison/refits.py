"""Which ridge weights are refitted with: the one whose model does best on the selection split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from training.config import RefitSearch
from training.pruner.evaluation import evaluate
from training.pruner.module import HeadPruner
from training.scoring.outputs import refit
from training.scoring.subject import Subject


@dataclass(frozen=True)
class Refit:
    """Weights refitted to a mask.

    Args:
        ridge: that did best.
        tried: the main metric on the selection split with each ridge.
        weights: parameters of the module by name, on the CPU.
    """

    ridge: float
    tried: list[float]
    weights: dict[str, Tensor]


def best_refit(
    subject: Subject, mask: Tensor, search: RefitSearch, dense: Mapping[str, Any], start: Mapping[str, Any]
) -> Refit:
    """Refit weights with every ridge, and keep those of the best, the first of equals.

    Args:
        subject: whose weights are refitted; they are changed.
        mask: 0/1 ``[gates]``.
        search: the ridges, and what they are fitted on.
        dense: state dict of the dense model, which is the aim.
        start: state dict to refit.
    """
    pruner = subject.module
    assert isinstance(pruner, HeadPruner)
    metric = f"select_{pruner.task.main_metric}"
    tried: list[float] = []
    weights: dict[str, Tensor] = {}
    for ridge in search.ridges:
        pruner.load_state_dict(dict(start))
        refit(subject, mask, dense, ridge=ridge, batches=search.batches, feed_forward=search.feed_forward)
        with pruner.fixed_to(mask):
            found = evaluate(subject.trainer, pruner, subject.data, ("select",))[metric]
        if not tried or found > max(tried):
            parameters = pruner.backbone.named_parameters()
            weights = {f"backbone.{name}": parameter.detach().cpu().clone() for name, parameter in parameters}
        tried.append(found)
    return Refit(search.ridges[tried.index(max(tried))], tried, weights)
