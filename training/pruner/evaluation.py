"""Evaluate a module on the selection and the test split."""

from __future__ import annotations

from collections.abc import Sequence

import pytorch_lightning as pl

from training.data.base import TaskData
from training.pruner.module import HeadPruner

SPLITS = ("select", "test")


def evaluate(trainer: pl.Trainer, pruner: HeadPruner, data: TaskData, splits: Sequence[str] = SPLITS) -> dict[str, float]:
    """Metrics on the named splits with the gates as they are, as ``select_accuracy`` and so on."""
    found: dict[str, float] = {}
    if "select" in splits:
        found |= trainer.validate(pruner, datamodule=data, verbose=False)[0]
    if "test" in splits:
        found |= trainer.test(pruner, datamodule=data, verbose=False)[0]
    return {name.replace("/", "_"): float(value) for name, value in found.items()}
