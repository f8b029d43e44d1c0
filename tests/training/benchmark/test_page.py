import io

import pytest
from rich.console import Console

from training.benchmark.page import GOALS, judged, markdown, show, shown
from training.benchmark.parts import PARTS
from training.benchmark.record import Record


def record(device="cpu", hardware="a processor", **parts):
    setting = {"device": device, "model": None, "shape": "tiny", "processor_time": False, "quick": False}
    return Record("python -m training benchmark", {"hardware": hardware, "cores": 2}, {"python": "3"}, setting, parts)


def spread(median):
    return {"median": median, "low": median / 2, "high": 2 * median}


STEP = {
    "model": "encoder",
    "size": "8 x 128",
    "compiled": "no",
    "plain_ms": spread(100.0),
    "gated_ms": spread(101.0),
    "time_ratio": spread(1.01),
}


@pytest.mark.parametrize(
    ("cell", "column", "text"),
    [
        (None, "size", ""), ("8 x 128", "size", "8 x 128"), (spread(1.0), "time_ratio", "1.000 (0.500 to 2.000)"),
        (12.345, "plain_ms", "12.3"), (1234.5, "plain_ms", "1,234"), (0.125, "heads_kept", "12.5 %"),
        (0.987, "of_ideal", "99 %"),
        (6738415616, "parameters", "6,738,415,616"),
    ],
)  # fmt: skip
def test_cells(cell, column, text):
    assert shown(cell, column) == text


def test_devices_stand_one_below_the_other():
    text = markdown([record(step=[STEP]), record("cuda", "a GPU", step=[STEP])], "step")
    assert text.index("a processor (2 cores)") < text.index("a GPU (2 cores)")
    assert (
        text.count("| encoder | 8 x 128 | no | 100 (50.0 to 200) | 101 (50.5 to 202) | 1.010 (0.505 to 2.020) |  |  |  |") == 2
    )
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {len(PARTS["step"].columns) + 1}


def test_goals_are_met_or_missed_or_not_measured():
    missed = {**STEP, "time_ratio": spread(1.05), "memory_ratio": 1.01}
    text = markdown([record(step=[STEP, missed])], GOALS)
    assert "| time of a gated step over a plain one | at most 1.02 | 1.05 | 1 of 2 | 2 of 2 | missed |" in text
    assert "| peak memory of a gated step over a plain one | at most 1.02 | 1.01 | 1 of 1 | 0 of 1 | met |" in text
    assert "| time of exact HIS over a plain forward and backward pass | at most 0.75 |  |  |  | not measured |" in text
    assert "one example at a time" not in text
    assert {found.verdict for found in judged(record(), list(PARTS))} == {"not measured"}
    assert markdown([record()], "step") == "Not measured yet."


def test_goals_of_gpus_are_theirs_alone():
    row = {"size": "32 x 128", "one_by_one_speedup": spread(12.0)}
    assert [found.verdict for found in judged(record(scores=[row]), ["scores"])] == ["not measured"]
    verdicts = [found.verdict for found in judged(record("cuda", scores=[row]), ["scores"])]
    assert verdicts == ["not measured", "missed"]


def test_every_goal_is_of_a_column():
    assert {goal.column for part in PARTS.values() for goal in part.goals} <= {
        column for part in PARTS.values() for column in part.columns
    }


def test_the_terminal_shows_tables_goals_and_the_machine():
    console = Console(record=True, width=200, file=io.StringIO())
    show(console, record(step=[STEP]), ["step", "scores"])
    text = console.export_text()
    assert PARTS["step"].title in text
    assert PARTS["scores"].title not in text
    assert "met" in text
    assert "a processor (2 cores)" in text
