"""Find a budget by quality: the fewest heads whose refitted model is as good as the dense one, within a given loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gates.errors import GateError
from gates.gating.budget import Budget
from training.comparison.experiments import PREDICTIONS, Experiments
from training.comparison.methods import Method
from training.comparison.selection import MaskSelector
from training.comparison.tables import compare_pair, metric_of
from training.runs import progress
from training.stats.numbers import counted, shown
from training.tasks.base import Task


@dataclass(frozen=True)
class QualityPoint:
    """The quality of a model with some heads on the selection split.

    Args:
        heads: The number of gates that are kept.
        loss: The loss against the dense model: points of the metric as it is shown, or percent of a perplexity.
        low, high: The ends of its 95 % interval, by a paired bootstrap over examples.
    """

    heads: int
    value: float
    loss: float
    low: float
    high: float


def fewest_heads(experiments: Experiments, method: Method, max_loss: float) -> tuple[int, list[QualityPoint]]:
    """Return the smallest budget of a method within a loss, found by bisection, and all budgets that were tried, in order.

    The quality has to fall with the number of heads; where it does not, the result is one of several possible ones.

    Args:
        max_loss: The most that the upper end of the interval of the loss may be.

    Raises:
        GateError: If no number of heads below all is within the loss.
        RefitError: If the model cannot be refitted.
    """
    gates, points = experiments.pruner.gates, dict[int, QualityPoint]()
    selector = MaskSelector(experiments, [gates.size])
    minimum = experiments.options.minimum_per_layer
    needed = int(gates.layer_index().bincount().clamp(max=minimum).sum())  # a layer may have fewer heads than the minimum
    if needed >= gates.size:
        raise GateError(
            f"minimum_per_layer is {minimum}, which keeps all {gates.size} {gates.unit}s, so there is no budget to find; give "
            "a smaller --model.minimum_per_layer"
        )
    fails, holds = max(0, needed - 1), gates.size
    with progress.stage("the fewest heads within the loss", gates.size.bit_length()) as shown_stage:
        while holds - fails > 1:
            heads = (fails + holds) // 2
            shown_stage.work_on(counted(heads, gates.unit))
            points[heads] = quality_at(experiments, selector, method, heads)
            if points[heads].high <= max_loss:
                holds = heads
            else:
                fails = heads
            shown_stage.advance()
    if holds == gates.size:
        nearest, metric = points[max(points)], experiments.pruner.task.main_metric
        raise GateError(
            f"max_loss is {max_loss:g}, but {method.name} with {nearest.heads} of {gates.size} {gates.unit}s may lose up to "
            f"{nearest.high:.2f} {measure_of(experiments.pruner.task)} of {metric} on the selection split; raise "
            "--model.max_loss, or give a larger selection split"
        )
    return holds, [points[heads] for heads in sorted(points)]


def measure_of(task: Task) -> str:
    """Return the measure of a loss of quality: points of the metric as it is shown, or percent of a perplexity."""
    return "percent" if task.lower_is_better else "points"


def quality_at(experiments: Experiments, selector: MaskSelector, method: Method, heads: int) -> QualityPoint:
    """Return the quality of a method's model with some heads, without training."""
    task = experiments.pruner.task
    selection = selector.select(method, Budget(heads, {}), post_hoc=True)
    dense = experiments.post_hoc(torch.ones_like(selection.values), splits=("select",))
    pruned = experiments.post_hoc(selection.values, splits=("select",), start=selection.refit)
    files = (pruned.path / PREDICTIONS, dense.path / PREDICTIONS)
    values, _, found = compare_pair(*files, "select", metric_of(task, experiments.data))
    metric = task.main_metric
    scale = 100 / float(values[1]) if task.lower_is_better else -shown(metric, 1.0)
    low, high = sorted((scale * found.low, scale * found.high))
    return QualityPoint(heads, float(values[0]), scale * found.difference, low, high)
