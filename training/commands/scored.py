"""Rankings by scores that a finished run did not compute, on its dense model and training data."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from training.analysis.model import ONE_DEVICE, load_dense
from training.runs import progress
from training.runs.run_directory import RunDirectory
from training.scoring.scorers import SCORERS, Scores
from training.scoring.subject import Subject
from training.setup import make_trainer


def ranking_by(name: str, run: RunDirectory) -> Tensor:
    """The scores ``[gates]`` by which a scored method ranks the heads of a run's dense model, higher kept first.

    Raises:
        GateError: if the run's data cannot be read, or the score is not defined for its model.
    """
    dense = load_dense(str(run.path))
    subject = Subject(dense.pruner, dense.data, make_trainer(dense.setup, **ONE_DEVICE))
    with progress.stage(f"scoring by {name}"):
        return Scores(subject).ranking(name, seed=dense.setup.run.seed)


LATER = {name: partial(ranking_by, name) for name, scorer in SCORERS.items() if scorer.ranks and not scorer.is_weighted}
"""By name the scored methods whose ranking follows from the dense model and training data, with nothing to choose."""
