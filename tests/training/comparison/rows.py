"""Rows of a comparison that nothing was run for."""

from pathlib import Path

import torch

from training.comparison.cache import Experiment
from training.comparison.selection import Selection
from training.comparison.tables import Row


def make_row(seed: int, method: str, stage: str, budget: int, key: str, folder: Path = Path()) -> Row:
    """A row of a comparison without metrics and costs, whose experiment has this key and lies in this folder."""
    whole = torch.ones(1)
    experiment = Experiment(key, folder, {})
    return Row(seed, method, stage, budget, budget, {}, {}, {}, Selection(whole, whole, experiment, {}, None), experiment)
