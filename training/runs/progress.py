"""Progress of the comparison: one bar over its experiments and one over the steps of the one that trains."""

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


class ExperimentProgress:
    """Counts the experiments of a comparison; the steps of one that trains show in a second bar."""

    def __init__(self, progress: Progress, count: int) -> None:
        self.progress = progress
        self.experiments = progress.add_task("comparing", total=count)
        self.steps = progress.add_task("training", visible=False)

    @classmethod
    def hidden(cls) -> ExperimentProgress:
        """One that nobody sees."""
        return cls(Progress(disable=True), 0)

    @contextmanager
    def experiment(self, name: str) -> Iterator[TrainingSteps]:
        """One experiment, named in the bar while it runs; the callback shows its training steps. The total grows if there are
        more than were foreseen, such as those that choose an option."""
        bar = next(task for task in self.progress.tasks if task.id == self.experiments)
        total = max(int(bar.total or 0), int(bar.completed) + 1)
        self.progress.update(self.experiments, description=f"comparing: {name}", total=total)
        yield TrainingSteps(self.progress, self.steps)
        self.progress.update(self.steps, visible=False)
        self.progress.advance(self.experiments)

    def end(self) -> None:
        """Nothing more comes, although some of what was foreseen was there already."""
        bar = next(task for task in self.progress.tasks if task.id == self.experiments)
        self.progress.update(self.experiments, total=bar.completed)


@contextmanager
def comparison_progress(count: int, *, visible: bool = True) -> Iterator[ExperimentProgress]:
    """Bars for a comparison of so many experiments."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not visible) as progress:
        shown = ExperimentProgress(progress, count)
        yield shown
        shown.end()
