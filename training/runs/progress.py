"""Progress: bars in a terminal, plain lines where standard error is piped.

Work is reported in stages, which nest: ``with stage("prune", total=83) as shown: shown.advance()``. Stages are shown only
within :func:`displayed`, which commands open, so the code below them knows nothing of terminals. Everything goes to standard
error; standard output has results alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from training.runs.launched import is_first_process

T = TypeVar("T")
INTERVAL = 30.0
"""Seconds between two lines about a stage without a terminal. A stage that takes longer also has a line at its end."""
REFRESH = 0.2
"""Seconds between two updates of a stage's bar in a terminal."""
Facts = Callable[[], str]
"""A function that returns more about a stage, such as ``loss 0.31``. It is called only when the stage is shown."""


class Stage:
    """Work that is under way. Made by :func:`begin` and :func:`stage`.

    Args:
        total: The number of pieces of work, such as steps. None if it is unknown.
        done: The number of pieces that were done before.
    """

    def __init__(self, display: Display, name: str, total: float | None, done: float) -> None:
        self.display, self.name, self.total, self.done, self.before = display, name, total, done, done
        self.item, self.began, self.shown = "", display.clock(), -REFRESH
        self._facts: Facts | None = None
        self._known = ""

    def advance(self, pieces: float = 1, facts: Facts | None = None) -> None:
        """Add finished pieces."""
        self.reach(self.done + pieces, facts)

    def reach(self, done: float, facts: Facts | None = None) -> None:
        """Set the number of finished pieces, at most the total."""
        self.done, self.item = done if self.total is None else min(done, self.total), ""
        self._facts = facts
        self.display.changed(self)

    def work_on(self, item: str) -> None:
        """Name the piece that is under way, until it is done."""
        self.item, self.shown = item, -REFRESH
        self.display.changed(self)

    def end(self, *, completed: bool = True) -> None:
        """End this stage and the stages within it."""
        self.display.end(self, completed=completed)

    @property
    def text(self) -> str:
        """Return the progress in words, such as ``comparison 3/22: his at 18 heads``. The piece under way counts."""
        if self._facts is not None:
            self._known, self._facts = self._facts(), None
        count = "" if self.total is None else f" {int(self.done) + bool(self.item)}/{self.total:g}"
        return f"{self.name}{count}" + f": {self.item}" * bool(self.item) + f", {self._known}" * bool(self._known)

    def seconds(self) -> float:
        return self.display.clock() - self.began

    def left(self) -> float | None:
        """Return the seconds to the end at the present speed, or None if they are unknown."""
        if self.total is None or self.done <= self.before:
            return None
        return self.seconds() * (self.total - self.done) / (self.done - self.before)


class Display:
    """The stages that are under way, the innermost last. This display shows nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.stages: list[Stage] = []

    def begin(self, name: str, total: float | None, done: float) -> Stage:
        stage = Stage(self, name, total, done)
        self.stages.append(stage)
        self.show_begin(stage)
        return stage

    def end(self, stage: Stage, *, completed: bool) -> None:
        """End a stage and those within it. A second call does nothing."""
        while stage in self.stages:
            last = self.stages.pop()
            self.show_end(last, completed=completed and last is stage)

    def changed(self, stage: Stage) -> None: ...

    def show_begin(self, stage: Stage) -> None: ...

    def show_end(self, stage: Stage, *, completed: bool) -> None: ...

    @contextmanager
    def paused(self) -> Iterator[None]:
        yield


class PlainLines(Display):
    """A line when an outermost stage begins, one every :data:`INTERVAL`, and one when a long stage ends."""

    def __init__(self, file: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.file = file
        self.last_printed = clock()

    def show_begin(self, stage: Stage) -> None:
        if len(self.stages) == 1:
            self._say(stage.text)
        else:
            self.changed(stage)

    def changed(self, stage: Stage) -> None:
        if self.clock() - self.last_printed < INTERVAL or stage not in self.stages:
            return
        shown = list(dict.fromkeys((self.stages[0], self.stages[-1])))
        left = next((seconds for one in shown if (seconds := one.left()) is not None), None)
        self._say("; ".join(one.text for one in shown) + ("" if left is None else f", about {duration(left)}"))

    def show_end(self, stage: Stage, *, completed: bool) -> None:
        if completed and not self.stages and stage.seconds() > INTERVAL:
            self._say(f"{stage.text}, took {duration(stage.seconds())}")

    def _say(self, text: str) -> None:
        self.last_printed = self.clock()
        print(text, file=self.file, flush=True)


class LiveBars(Display):
    """A bar for every stage under way, the innermost at the bottom. An outermost stage leaves a line when it ends."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.console = console
        self._bars: Progress | None = None
        self._tasks: dict[Stage, TaskID] = {}

    def show_begin(self, stage: Stage) -> None:
        if self._bars is None:
            self._bars = self._new_bars()
            self._bars.start()
        self._tasks[stage] = self._bars.add_task(self._indented(stage), total=stage.total, completed=stage.done)  # type: ignore[arg-type]

    def changed(self, stage: Stage) -> None:
        if self._bars is not None and stage in self._tasks and self.clock() - stage.shown >= REFRESH:
            stage.shown = self.clock()
            self._bars.update(self._tasks[stage], completed=stage.done, description=self._indented(stage))

    def show_end(self, stage: Stage, *, completed: bool) -> None:
        assert self._bars is not None
        self._bars.remove_task(self._tasks.pop(stage))
        if not self.stages:
            self._bars.stop()
            self._bars = None
            if completed:
                text = f"{stage.text}, {duration(stage.seconds())}"
                self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._bars is None:
            yield
            return
        self._bars.stop()
        try:
            yield
        finally:
            self._bars.start()

    def _indented(self, stage: Stage) -> str:
        return "  " * self.stages.index(stage) + stage.text

    def _new_bars(self) -> Progress:
        return Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=self.console,
            transient=True,
            refresh_per_second=5,
            speed_estimate_period=3600.0,
            redirect_stdout=sys.stdout.isatty(),
        )


_current: ContextVar[Display] = ContextVar("display", default=Display())  # noqa: B039 (it holds nothing between stages)


def begin(name: str, total: float | None = None, done: float = 0) -> Stage:
    """Begin a stage whose end is elsewhere in the code; end it with :meth:`Stage.end`."""
    return _current.get().begin(name, total, done)


@contextmanager
def stage(name: str, total: float | None = None) -> Iterator[Stage]:
    """Show a stage during a ``with`` block, or a function that this decorates."""
    shown, completed = begin(name, total), False
    try:
        yield shown
        completed = True
    finally:
        shown.end(completed=completed)


def track(items: Iterable[T], name: str, *, name_of: Callable[[T], str] = lambda item: "") -> Iterator[T]:
    """Iterate over items in a stage of their own. An item is done when the next one is requested."""
    with stage(name, len(items) if isinstance(items, Sized) else None) as shown:
        for item in items:
            shown.work_on(name_of(item))
            yield item
            shown.advance()


@contextmanager
def paused() -> Iterator[None]:
    """Draw no bars during a ``with`` block that prints."""
    with _current.get().paused():
        yield


def notice(sentence: str) -> None:
    """Print a sentence on standard output, in the first process alone, past the bars."""
    if is_first_process(os.environ):
        with paused():
            Console().print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def displayed(*, visible: bool = True) -> Iterator[None]:
    """Show stages during a ``with`` block, in the first process alone."""
    display = _fitting_display() if visible and is_first_process(os.environ) else Display()
    token = _current.set(display)
    try:
        yield
    finally:
        for left in display.stages[:1]:
            left.end(completed=False)
        _current.reset(token)


def hide() -> None:
    """Show nothing more within the present :func:`displayed`."""
    _current.set(Display())


def duration(seconds: float) -> str:
    """Return a time in words, such as ``40 s``, ``2 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _fitting_display() -> Display:
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return LiveBars(Console(stderr=True))
    return PlainLines(sys.stderr)
