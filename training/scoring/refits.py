"""Weights refitted to a mask, where that helps on the selection split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from gates.errors import GateError
from training.config import RefitOptions
from training.runs import processes, progress
from training.runs.cost import Cost, measured
from training.scoring.passes import refit
from training.scoring.subject import ScoringContext
from training.stats.numbers import quantity


class RefitError(GateError):
    """Say why the weights of a model cannot be refitted."""


class Quality(NamedTuple):
    """Hold the main metric and the mean loss of an example, of all processes, and the losses in this one ``[examples]``."""

    metric: float
    loss: float
    losses: Tensor


@dataclass(frozen=True)
class Refit:
    """The result of a refit.

    Args:
        is_applied: Whether the weights are the refitted ones. They stay as they were where the refit makes the model clearly
            worse.
        refitted: The main metric on the selection split after the refit.
        unrefitted: The metric with the mask alone.
        loss: The loss on the selection split with the weights that stay.
    """

    is_applied: bool
    refitted: float
    unrefitted: float
    loss: float
    cost: Cost

    @property
    def reached(self) -> float:
        """Return the metric with the weights that stay."""
        return self.refitted if self.is_applied else self.unrefitted

    def as_result(self) -> dict[str, Any]:
        """Return the JSON of an experiment."""
        numbers = {"is_applied": self.is_applied, "refitted": self.refitted, "unrefitted": self.unrefitted}
        return numbers | {"reached": self.reached, "loss": self.loss} | self.cost.as_row()


def refit_if_better_(subject: ScoringContext, mask: Tensor, search: RefitOptions, dense: Mapping[str, Tensor]) -> Refit:
    """Refit weights to a mask, undo it if the model does clearly worse on the selection split, and return how it went.

    Clearly worse is a worse metric together with a higher loss by more than two standard errors. A few examples decide a metric
    on a small split.

    Args:
        subject: The model with the weights to refit. They are changed.
        dense: The parameters of the dense model by name, whose outputs are the aim.

    Raises:
        RefitError: If this model cannot be refitted.
    """
    start = copied_weights(subject)
    with measured(subject.device, subject.gates) as cost, progress.stage("refitting"):
        alone = quality(subject, mask)
        try:
            refit(subject, mask, dense, search)
        except GateError as error:
            raise RefitError(str(error)) from error
        except RuntimeError as error:
            if not lacks_memory(error) or processes.world_size() > 1:  # the others would wait for this one
                raise
            raise RefitError(f"{subject.device} has too little memory for a refit on {search.rows} rows") from error
        refitted = quality(subject, mask)
    gain, metric = subject.task.gain, subject.task.main_metric
    is_applied = not math.isnan(refitted.metric) and (
        math.isnan(alone.metric)
        or gain(refitted.metric) >= gain(alone.metric)
        or not rises(subject, refitted.losses - alone.losses)
    )
    if not is_applied:
        use_weights_(subject, start)
        progress.notice(
            f"{metric} on the selection split is {quantity(metric, alone.metric)} with a mask of {int(mask.sum())} alone and "
            f"{quantity(metric, refitted.metric)} after the refit. The loss is clearly higher, so the weights stay as they were"
        )
    loss = (refitted if is_applied else alone).loss
    return Refit(is_applied, refitted.metric, alone.metric, loss, cost.cost)


def lacks_memory(error: RuntimeError) -> bool:
    """Return whether an error says that a device has too little memory. On a CPU it has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def rises(subject: ScoringContext, changes: Tensor) -> bool:
    """Return whether the mean of changes ``[examples]`` of all processes is more than two standard errors above 0."""
    own = torch.stack([changes.new_tensor(len(changes)), changes.sum(), changes.square().sum()])
    count, total, squares = subject.summed(own).tolist()
    mean = total / count
    variance = max(squares / count - mean**2, 0.0) / max(count - 1, 1)
    return not mean <= 2 * math.sqrt(variance)


def quality(subject: ScoringContext, mask: Tensor) -> Quality:
    """Return the quality on the selection split with a mask ``[gates]``."""
    loader, limit = subject.data.val_dataloader(), subject.trainer.limit_val_batches
    batches = limit if isinstance(limit, int) else int(limit * len(loader))
    metrics, loss = subject.task.metrics("select").to(subject.device), MeanMetric().to(subject.device)
    own = [torch.zeros(0, device=subject.device)]  # a process may have no example
    with subject.at_rest(), subject.gates.use(mask.to(subject.device)), torch.no_grad():
        for batch in islice(subject.on_device(loader, bar=False), batches):
            losses, logits = subject.outputs(batch)
            subject.task.update(metrics, subject.backbone, batch, logits)
            loss.update(losses)
            own.append(losses.float())
    return Quality(float(metrics.compute()[subject.task.main_metric]), float(loss.compute()), torch.cat(own))


def copied_weights(subject: ScoringContext) -> dict[str, Tensor]:
    """Return copies of the parameters on the CPU, by name."""
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in subject.backbone.named_parameters()}


def use_weights_(subject: ScoringContext, weights: Mapping[str, Tensor]) -> None:
    """Restore the weights that :func:`copied_weights` returned."""
    for name, parameter in subject.backbone.named_parameters():
        parameter.data.copy_(weights[name])
