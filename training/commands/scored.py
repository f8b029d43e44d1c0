"""Rankings by scores that a finished run did not compute, on its dense model and training data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from training.analysis.model import DenseModel
from training.runs import progress
from training.scoring.scorers import SCORERS, Scores

LATER = [name for name, scorer in SCORERS.items() if scorer.ranks and not scorer.is_weighted]
"""The scored methods whose ranking follows from the dense model and training data, with nothing to choose."""


def later_rankings(dense: Callable[[], DenseModel]) -> dict[str, Callable[[], Tensor]]:
    """By name what computes the scores ``[gates]`` by which a method of :data:`LATER` ranks heads, higher kept first.

    Args:
        dense: loads the run's model and data; it is asked when a ranking is.
    """
    return {name: partial(_ranking_by, name, dense) for name in LATER}


def _ranking_by(name: str, dense: Callable[[], DenseModel]) -> Tensor:
    model = dense()
    with progress.stage(f"scoring by {name}"):
        return Scores(model.subject()).ranking(name, seed=model.setup.run.seed)
