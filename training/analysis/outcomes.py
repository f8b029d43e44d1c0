"""What a model does under masks: the metric of a classifier, the loss of every other task, with paired tests over examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from training.stats.bootstrap import Array, Difference, metric_values, resample_metric, resampled_difference
from training.stats.significance import interval, mcnemar

LOSS = "loss"


@dataclass(frozen=True)
class Measure:
    """How a metric is read.

    Args:
        name: of the metric, or :data:`LOSS`.
        scale: what it is multiplied with to be shown.
        sign: 1 where more is better, -1 where less is.
        digits: behind the point of what is shown.
        unit: behind a shown change.
    """

    name: str
    scale: float = 100.0
    sign: int = 1
    digits: int = 1
    unit: str = " points"

    @classmethod
    def of(cls, metric: str) -> Measure:
        """That of a classifier's metric, or of the loss."""
        return cls(LOSS, 1.0, -1, 3, "") if metric == LOSS else cls(metric)

    @property
    def worsens(self) -> str:
        """What happens to it where a head is missed."""
        return "lowers" if self.sign > 0 else "raises"

    @property
    def improves(self) -> str:
        return "raises" if self.sign > 0 else "lowers"

    def told(self, value: float, *, change: bool = False) -> str:
        """A value, or a change with its sign and unit."""
        shown = self.scale * value
        return f"{shown:+.{self.digits}f}{self.unit}" if change else f"{shown:.{self.digits}f}"


@dataclass(frozen=True)
class ClassOutcomes:
    """What a classifier does with every example under every mask.

    Args:
        losses: ``[masks, examples]``.
        predictions: classes ``[masks, examples]``.
        targets: classes ``[examples]``.
        metric: the main metric's name.
    """

    losses: Array
    predictions: NDArray[np.int64]
    targets: NDArray[np.int64]
    metric: str

    @property
    def measure(self) -> Measure:
        return Measure.of(self.metric)

    @property
    def values(self) -> Array:
        """The main metric under every mask, ``[masks]``."""
        return metric_values(self.predictions, self.targets, self.metric)

    def against_first(self) -> list[Difference]:
        """The change of the metric from the first mask to each further one: its 95 % interval by the paired bootstrap over
        examples; the p value for accuracy by McNemar's exact test."""
        values, replicates = resample_metric(self.predictions, self.targets, self.metric)
        found = []
        for index in range(1, len(values)):
            difference = resampled_difference(float(values[index] - values[0]), replicates[:, index] - replicates[:, 0])
            if self.metric == "accuracy":
                right = self.predictions == self.targets
                difference = difference._replace(p=mcnemar(right[index], right[0]))
            found.append(difference)
        return found


@dataclass(frozen=True)
class LossOutcomes:
    """The loss of every example under every mask, of any task.

    Args:
        losses: ``[masks, examples]``.
    """

    losses: Array

    @property
    def measure(self) -> Measure:
        return Measure.of(LOSS)

    @property
    def values(self) -> Array:
        """The mean loss under every mask, ``[masks]``."""
        return self.losses.mean(axis=1)

    def against_first(self) -> list[Difference]:
        """The change of the mean loss from the first mask to each further one, with Student's interval and paired t test over
        examples."""
        return [paired_change(losses - self.losses[0]) for losses in self.losses[1:]]


Outcomes = ClassOutcomes | LossOutcomes


def paired_change(changes: Array) -> Difference:
    """The mean of changes ``[examples]`` with Student's interval and paired test; of changes that are all alike there is no
    spread, and p is 1 if they are zero and else 0.

    >>> found = paired_change(np.array([1.0, 2.0, 3.0]))
    >>> found.difference, round(found.p, 3)
    (2.0, 0.074)
    """
    found = interval(changes)
    constant = found.seeds < 2 or found.std == 0
    p = float(found.mean == 0) if constant else float(stats.ttest_1samp(changes, 0).pvalue)
    return Difference(found.mean, found.low, found.high, p)
