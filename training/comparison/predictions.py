"""The predictions that an experiment keeps beside its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.pruner.callbacks import Predictions
from training.runs import processes

PREDICTIONS = "predictions.npz"


def write_predictions(folder: Path, predictions: Predictions) -> None:
    """Write ``predictions.npz``; every process has to call this."""
    arrays = predictions.arrays()
    if processes.is_first():
        np.savez_compressed(folder / PREDICTIONS, **arrays)  # type: ignore[arg-type]
