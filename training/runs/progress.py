"""Progress of the comparison: one bar over its cells and one over the steps of the cell that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingSteps(pl.Callback):
    """Advance a bar by the batches of a trainer's fit."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.progress.reset(self.task, total=trainer.num_training_batches, visible=True)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self.progress.update(self.task, completed=args[2] + 1)


class CellProgress:
    """Counts the cells of a comparison; the steps of a training cell show in a second bar."""

    def __init__(self, progress: Progress, cells: int) -> None:
        self.progress = progress
        self.cells = progress.add_task("comparing", total=cells)
        self.steps = progress.add_task("training", visible=False)

    @contextmanager
    def cell(self, name: str) -> Iterator[TrainingSteps]:
        """One cell, named in the bar while it runs; the callback shows its training steps."""
        self.progress.update(self.cells, description=f"comparing: {name}")
        yield TrainingSteps(self.progress, self.steps)
        self.progress.update(self.steps, visible=False)
        self.progress.advance(self.cells)


@contextmanager
def cell_progress(cells: int, *, visible: bool = True) -> Iterator[CellProgress]:
    """Bars for a comparison of so many cells."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not visible) as progress:
        yield CellProgress(progress, cells)
