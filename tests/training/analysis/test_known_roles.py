"""Roles of compiled heads: those that look one place back are found, and noise has no role."""

import numpy as np
import pandas as pd
import pytest

from training.analysis.known_roles import BUILT, NEEDED, OTHERS, known_roles, method_table, offset_of, program_rows
from training.commands.table import run_command
from training.truth.programs import PREVIOUS, PROGRAMS


def write_truth(folder, programs=("induction", "majority"), seeds=(0, 1)):
    folder.mkdir(exist_ok=True)
    recalls = {("his", "induction"): (0.5, 0.7), ("his", "majority"): (1.0, 1.0), ("dsp", "induction"): (0.0, 0.2)}
    rows = [
        {
            "seed": seed,
            "method": method,
            "budget": budget,
            "needed": 3,
            "recall": found if budget == 3 else 1.0,
            "program": name,
        }
        for (method, name), own in recalls.items()
        if name in programs
        for seed, found in zip(seeds, own, strict=False)
        for budget in (3, 4)
    ]
    for row in rows:
        row["recall"] = row["recall"] if row["budget"] == 3 else 1.0
    pd.DataFrame(rows).to_csv(folder / "truth.csv", index=False)
    return folder


def test_the_distance_that_a_head_is_built_for():
    heads = {head.does: head for layer in PROGRAMS["palindrome"].layers for head in layer.heads}
    assert offset_of(PREVIOUS, PROGRAMS["bigram"]) == -1
    assert offset_of(heads["mirror"], PROGRAMS["palindrome"]) is None  # another distance at every place
    assert offset_of(heads["seek"], PROGRAMS["palindrome"]) is None  # a flag, at any place
    (last,) = [head for head in PROGRAMS["induction"].layers[0].heads if head.does == "last"]
    assert offset_of(last, PROGRAMS["induction"]) is None  # from one place alone


@pytest.mark.parametrize("seed", [0, 3])
def test_every_head_for_one_distance_is_found_at_it_and_no_other_one(seed):
    for name in ("bigram-undone", "induction-copies", "palindrome"):
        rows = pd.DataFrame(program_rows(PROGRAMS[name], seed))
        assert len(rows) == PROGRAMS[name].total_heads
        built = rows[rows["group"] == BUILT]
        assert len(built) == sum(head == PREVIOUS for layer in PROGRAMS[name].layers for head in layer.heads)
        assert (built["roles"] == "positional").all()
        assert (built["positional_by"] == "-1").all()
        assert not rows.loc[rows["group"] != BUILT, "roles"].str.contains("positional").any()
        assert set(rows.loc[rows["group"] == OTHERS, "needed"]) <= {False}
    assert not built["needed"].any()  # palindrome holds a second program, whose head no question needs


def test_necessary_heads_that_read_at_the_first_token_look_like_sinks():
    rows = pd.DataFrame(program_rows(PROGRAMS["majority"], 0))
    assert rows.loc[rows["group"] == NEEDED, "roles"].tolist() == ["first-token"]


def test_what_methods_keep_at_as_many_heads_as_needed(tmp_path):
    truth = pd.read_csv(write_truth(tmp_path / "run") / "truth.csv")
    table = method_table(truth, {"induction"}).set_index(["method", "positional"])
    assert table.loc[("his", "with"), "recall"] == pytest.approx(0.6)
    assert 0 < table.loc[("his", "with"), "low"] < 0.6 < table.loc[("his", "with"), "high"] < 1
    assert table.loc[("his", "without"), "recall"] == 1
    assert np.isnan(table.loc[("his", "without"), "low"])
    assert ("dsp", "without") not in table.index


def test_the_experiment_and_what_it_refuses(tmp_path, capsys):
    finding = known_roles(str(write_truth(tmp_path / "run")))
    groups = finding.tables["known_roles"].set_index(["group", "role"])
    assert groups.loc[(BUILT, "positional"), ["heads", "with_role"]].tolist() == [2, 2]
    assert finding.numbers == {"models": 4, "heads": 2 * (12 + 6)}
    out = str(tmp_path / "out")
    for change, message in (
        (lambda table: table.assign(program="bigrams"), "has a program 'bigrams', which there is not"),
        (lambda table: table.drop(columns="program"), "has a program without a name"),
        (lambda table: table.drop(columns="recall"), "has no column 'recall'"),
        (lambda table: table[:0], "is empty"),
    ):
        other = write_truth(tmp_path / "other")
        change(pd.read_csv(other / "truth.csv")).to_csv(other / "truth.csv", index=False)
        assert run_command("analyze", [str(other), "--experiments", "known-roles", "--run_dir", out]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
    assert run_command("analyze", [str(tmp_path), "--experiments", "known-roles", "--run_dir", out]) == 2
    assert "has no truth.csv" in capsys.readouterr().err
