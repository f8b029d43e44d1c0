"""Stages of work in plain lines and in bars."""

import io

import pytest
from rich.console import Console

from training.runs import progress
from training.runs.launched import VARIABLES
from training.runs.progress import LiveBars, PlainLines


class Clock:
    """Says what time it is told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(clock):
    """A display for a pipe; its lines are ``lines.file.getvalue().splitlines()``."""
    return PlainLines(io.StringIO(), clock)


def said(display):
    return display.file.getvalue().splitlines()


def test_a_pipe_gets_a_line_at_once_and_then_one_per_30_seconds(lines, clock):
    prune = lines.begin("prune", 83, 0)
    times = []
    for step in range(1, 84):
        clock.now += 1.5
        before = len(said(lines))
        prune.reach(step, lambda step=step: f"loss {1 / step:.2f}, heads 31 -> 18")
        times += [clock.now] * (len(said(lines)) - before)
    prune.end()
    assert said(lines) == [
        "prune 0/83",
        "prune 20/83, loss 0.05, heads 31 -> 18, about 2 min",
        "prune 40/83, loss 0.03, heads 31 -> 18, about 64 s",
        "prune 60/83, loss 0.02, heads 31 -> 18, about 34 s",
        "prune 80/83, loss 0.01, heads 31 -> 18, about 4 s",
        "prune 83/83, loss 0.01, heads 31 -> 18, took 2 min",
    ]
    assert times == [130.0, 160.0, 190.0, 220.0]


def test_a_stage_within_another_has_no_line_of_its_own_before_its_time(lines, clock):
    outer = lines.begin("comparison", 4, 0)
    clock.now += 20
    outer.work_on("dense, post hoc")
    outer.advance()
    outer.work_on("his at 18 heads, retrained")
    inner = lines.begin("retrain", 50, 10)
    clock.now += 10
    inner.advance(5)
    inner.end()
    lines.begin("evaluating test", 4, 0).end()
    assert said(lines) == ["comparison 0/4", "comparison 2/4: his at 18 heads, retrained; retrain 15/50, about 2 min"]
    outer.end()


def test_what_was_done_before_does_not_count_as_fast(lines, clock):
    stage = lines.begin("finetune", 100, 90)
    clock.now += 10
    stage.advance(5)
    assert stage.left() == pytest.approx(10)
    assert stage.text == "finetune 95/100"


def test_a_total_is_never_exceeded(lines):
    stage = lines.begin("swaps", 6.0, 0)
    stage.advance(8.5)
    assert stage.text == "swaps 6/6"
    assert stage.left() == 0


def test_a_failure_ends_stages_without_a_word(lines, clock, monkeypatch):
    monkeypatch.setattr(progress, "_fitting_display", lambda: lines)

    @progress.stage("prune", 3)
    def fails():
        progress.begin("evaluating select")  # whoever began it never comes to its end
        clock.now += 100
        raise RuntimeError

    with progress.displayed(), pytest.raises(RuntimeError):
        fails()
    assert said(lines) == ["prune 0/3"]
    assert lines.stages == []


def test_a_pipe_gets_no_control_characters(capfd):
    with progress.displayed():
        with progress.stage("prune", 2) as stage:
            stage.advance()
            with progress.paused():
                print("result")
        progress.hide()
        with progress.stage("hidden"):
            pass
    with progress.stage("shown by nobody"):
        pass
    told = capfd.readouterr()
    assert told.err == "prune 0/2\n"
    assert told.out == "result\n"


@pytest.mark.parametrize(("environment", "first"), [({}, True), ({"LOCAL_RANK": "0"}, True), ({"LOCAL_RANK": "1"}, False)])
def test_the_first_process_alone_tells(environment, first, monkeypatch, capfd):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with progress.displayed(), progress.stage("prune"):
        pass
    assert capfd.readouterr().err == "prune\n" * first


def test_a_terminal_has_a_bar_per_stage_and_a_line_for_each_that_ended(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    display = LiveBars(console, clock)
    outer = display.begin("comparison", 3, 0)
    outer.work_on("his at 18 heads")
    inner = display.begin("retrain", 50, 0)
    inner.advance(25, lambda: "loss 0.31")
    seen = Console(file=io.StringIO(), width=100)
    seen.print(display._bars.get_renderable())
    first, second = seen.file.getvalue().splitlines()
    assert first.startswith("comparison 1/3: his at 18 heads ")
    assert second.startswith("  retrain 25/50, loss 0.31 ")
    inner.end()
    clock.now += 42
    outer.reach(3)
    outer.end()
    assert console.file.getvalue().splitlines()[-1].endswith("comparison 3/3, 42 s")
    with display.paused():  # with nothing under way
        pass
