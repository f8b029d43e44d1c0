"""When heads close, by role, from gates whose course is known."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.training.analysis.test_survival import SPECIAL, write_roles
from training.analysis.closing import closing_of_roles, closing_times, read_closings
from training.commands.table import run_command

NAMES = [f"encoder.{layer}.{head}" for layer in range(2) for head in range(4)]


def write_gates(folder, courses, steps=(10, 20, 30)):
    """Rows of gates over time: by method, budget and seed ``[steps, gates]``."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"seed": seed, "method": method, "budget": budget, "step": step, **dict(zip(NAMES, values, strict=True))}
        for (method, budget, seed), course in courses.items()
        for step, values in zip(steps, course, strict=True)
    ]
    pd.DataFrame(rows).to_csv(folder / "gates_over_time.csv", index=False)
    return folder


def course(closes):
    """Gates that are open at the steps before a number and closed from there on."""
    return [[float(step < last) for last in closes] for step in range(3)]


LATE = course([3, 3, 2, 1, 1, 2, 0, 1])
EARLY = course([0, 1, 1, 3, 3, 2, 2, 3])


def test_times_are_those_of_the_last_fall():
    steps = np.array([100.0, 110.0, 140.0])
    gates = np.array([[1.0, 1.0, 0.2, 0.4, 0.9], [0.5, 0.0, 0.8, 0.1, 0.7], [0.5, 0.0, 0.2, 0.0, 0.5 - 1e-9]])
    found = closing_times(steps, gates)
    assert found[0] == np.inf  # one half is not below one half
    assert found[1] == pytest.approx(0.5 * 0.25)
    assert found[2] == pytest.approx(0.25 + 0.5 * 0.75)  # it had been closed before
    assert found[3] == 0
    assert found[4] == pytest.approx(1)


def test_specialised_heads_that_close_later(tmp_path):
    run = write_gates(tmp_path / "run", {("learned", 3, seed): LATE for seed in (0, 1)})
    finding = closing_of_roles(str(run), write_roles(tmp_path))
    row = finding.tables["closing"].set_index("role").loc["specialised"]
    times = closing_times(np.arange(3.0), np.array(LATE))
    special = np.array(SPECIAL, dtype=bool)
    pairs = [(x > y) + 0.5 * (x == y) for x in times[special] for y in times[~special]]
    assert row["later"] == pytest.approx(np.mean(pairs))
    assert row["closed"] == pytest.approx(1 / 3)
    assert np.isnan(row["median_time"])  # most of them stay open
    heads = finding.tables["closing_heads"]
    assert heads["closes_in"].tolist() == [0, 0, 2, 2, 2, 2, 2, 2]
    assert heads["roles"].tolist() == ["syntactic"] * 3 + ["none"] * 5
    assert "closing" in finding.figures
    earlier = closing_of_roles(str(write_gates(tmp_path / "other", {("learned", 3, 0): EARLY})), write_roles(tmp_path))
    assert earlier.tables["closing"]["later"].iloc[0] < 0.5 < row["later"]


def test_methods_with_the_gates_of_another_are_left_out(tmp_path):
    run = write_gates(tmp_path / "run", {("learned", 3, 0): LATE, ("learned+swap", 3, 0): LATE, ("dsp", 3, 0): EARLY})
    assert [found.method for found in read_closings(run)] == ["learned", "dsp"]


def test_the_command_and_what_it_refuses(tmp_path, capsys):
    run, roles = write_gates(tmp_path / "run", {("learned", 3, 0): LATE}), write_roles(tmp_path)

    def call(run, *arguments):
        return run_command("analyze", [str(run), "--experiments", "closing", "--run_dir", str(tmp_path / "out"), *arguments])

    assert call(run, "--roles", roles) == 0
    assert "a specialised head closes after another one in" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["experiments"]["closing"]["figures"]
    (tmp_path / "bare").mkdir()
    short = write_gates(tmp_path / "short", {("learned", 3, 0): LATE[:1]}, steps=(10,))
    other = pd.read_csv(roles)
    other[:6].to_csv(tmp_path / "fewer.csv", index=False)
    other.assign(specialised="perhaps").to_csv(tmp_path / "odd.csv", index=False)
    for where, file, message in (
        (tmp_path / "bare", roles, "has no gates_over_time.csv"),
        (short, roles, "too few steps"),
        (run, str(tmp_path / "fewer.csv"), "the roles have 2 heads of encoder.1"),
        (run, str(tmp_path / "odd.csv"), "expected True or False"),
    ):
        assert run_command(
            "analyze", [str(where), "--experiments", "closing", "--roles", file, "--run_dir", str(tmp_path / "new")]
        ) == 2  # fmt: skip
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert error.splitlines()[-1].startswith("error: ")
