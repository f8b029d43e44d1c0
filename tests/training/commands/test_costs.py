"""Costs of methods beside their results."""

from functools import partial

import pandas as pd

from tests.training.commands.test_summary import run
from training.commands.table import run_command

main = partial(run_command, "summary")
ROWS = [
    # method, stage, heads, quality, forward, backward
    ("dense", "post hoc", 72, 0.9, 0, 0),
    ("his", "post hoc", 18, 0.8, 2000, 1000), ("his", "post hoc", 9, 0.7, 2000, 1000),
    ("swap", "post hoc", 18, 0.8, 9000, 0), ("swap", "post hoc", 9, 0.7, 12345, 0),
    ("dense", "retrained", 72, 0.9, 7000, 7000),
    ("his", "retrained", 18, 0.9, 9000, 8000), ("his", "retrained", 9, 0.9, 9000, 8000),
    ("swap", "retrained", 18, 0.9, 15000, 6000), ("swap", "retrained", 9, 0.9, 18345, 6000),
]  # fmt: skip


def counted(folder, seed=0, rows=ROWS, more=0):
    run(folder, seed, [row[:4] for row in rows])
    table = pd.read_csv(folder / "comparison.csv")
    selecting = {(row[0], row[2]): row for row in rows if row[1] == "post hoc"}
    for place, direction in ((4, "forward"), (5, "backward")):
        table[f"{direction}_examples"] = [row[place] + more for row in rows]
        table[f"selection_{direction}_examples"] = [selecting[row[0], row[2]][place] + more for row in rows]
    table.to_csv(folder / "comparison.csv", index=False)
    return str(folder)


def test_costs_of_selection_and_of_retraining_stand_beside_the_results(tmp_path, capsys):
    assert main([counted(tmp_path / "a"), "--costs"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "| stage | method | 72 heads | 18 heads | 9 heads | selection, forward | selection, backward | retraining, forward "
        "| retraining, backward |"
    )
    assert out[1].count("--:") == 7
    assert "| post hoc | his |  | 80.0 | 70.0 | 2.0 | 1.0 | 0.0 | 0.0 |" in out
    assert "| retrained | dense | 90.0 |  |  | 0.0 | 0.0 | 7.0 | 7.0 |" in out
    assert "| retrained | his |  | 90.0 | 90.0 | 2.0 | 1.0 | 7.0 | 7.0 |" in out
    assert "| retrained | swap |  | 90.0 | 90.0 | 9.0 / 12.3 | 0.0 | 6.0 | 6.0 |" in out
    assert "thousands of examples" in out[-1]
    assert main([str(tmp_path / "a")]) == 0
    assert "selection" not in capsys.readouterr().out


def test_they_are_means_over_seeds_of_the_chosen_rows(tmp_path, capsys):
    runs = [counted(tmp_path / "a"), counted(tmp_path / "b", seed=1, more=1000)]
    assert main([*runs, "--costs", "--stage", "retrained", "--methods", "his"]) == 0
    assert "| retrained | his | 90.0 ± 0.0 | 90.0 ± 0.0 | 2.5 | 1.5 | 7.0 | 7.0 |" in capsys.readouterr().out
    assert main([*runs, "--costs", "--stage", "post hoc", "--methods", "his"]) == 0
    assert "| selection, forward | selection, backward |\n" in capsys.readouterr().out  # nothing is retrained


def test_tables_that_say_no_costs_are_named(tmp_path, capsys):
    assert main([run(tmp_path / "old", 0, [row[:4] for row in ROWS]), "--costs"]) == 2
    assert "do not say what selecting heads took" in capsys.readouterr().err
    assert main([str(tmp_path / "old"), "--truth", "programs", "--costs"]) == 2
