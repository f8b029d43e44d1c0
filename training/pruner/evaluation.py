"""Evaluate a module on the selection and the test split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytorch_lightning as pl

from training.data.base import TaskData
from training.pruner.module import HeadPruner

SPLITS = ("select", "test")


def evaluate(trainer: pl.Trainer, pruner: HeadPruner, data: TaskData, splits: Sequence[str] = SPLITS) -> dict[str, float]:
    """Metrics on the named splits with the gates as they are, as ``select_accuracy`` and so on; with the test split also those
    on further test splits, as ``test_mismatched_accuracy``."""
    found: dict[str, float] = {}
    if "select" in splits:
        found |= trainer.validate(pruner, datamodule=data, verbose=False)[0]
    if "test" in splits:
        found |= trainer.test(pruner, datamodule=data, verbose=False)[0]
        for name in data.more_tests:
            with _tested_on(pruner, name):
                found |= trainer.test(pruner, dataloaders=data.more_test_dataloader(name), verbose=False)[0]
    return {name.replace("/", "_"): float(value) for name, value in found.items()}


@contextmanager
def _tested_on(pruner: HeadPruner, split: str) -> Iterator[None]:
    """Tests are on a further test split in a ``with`` block, and metrics are named for it."""
    pruner.tested = split
    try:
        yield
    finally:
        pruner.tested = "test"
