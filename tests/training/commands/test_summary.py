import copy
import json
import pathlib
from functools import partial

import pandas as pd
import pytest
import yaml

from training.commands.table import run_command

main = partial(run_command, "summary")


def run(folder, seed, rows):
    folder.mkdir()
    table = pd.DataFrame(rows, columns=["method", "stage", "heads", "test_accuracy"])
    table.assign(seed=seed, budget=table["heads"]).to_csv(folder / "comparison.csv", index=False)
    (folder / "metrics.json").write_text(json.dumps({"heads": 72, "budgets_by_kind": {}}))
    return str(folder)


def test_means_and_spreads_over_seeds(tmp_path, capsys):
    runs = [
        run(tmp_path / "a", 0, [("his", "post hoc", 18, 0.80), ("his", "post hoc", 9, 0.70), ("dense", "retrained", 72, 0.9)]),
        run(tmp_path / "b", 1, [("his", "post hoc", 18, 0.82), ("dense", "retrained", 72, 0.9)]),
    ]
    assert main(runs) == 0
    out = capsys.readouterr().out
    assert "| stage | method | 72 heads | 18 heads | 9 heads |" in out
    assert "| post hoc | his |  | 81.0 ± 1.4 | 70.0 (1 seed) |" in out
    assert "| retrained | dense | 90.0 ± 0.0 |" in out
    assert "2 seeds (0, 1)" in out


def test_a_verdict_is_quoted_whole_or_by_stage(tmp_path, capsys):
    stages = "## Post hoc\n\n- **Budget 4**: a.\n\n## Retrained\n\n- **Budget 4**: b.\n\n"
    (tmp_path / "verdict.md").write_text(f"# Verdict\n\nNumbers.\n\n{stages}The mean of the best of x.\n")
    assert main([str(tmp_path), "--verdict"]) == 0
    assert capsys.readouterr().out.startswith("Numbers.\n\n#### Post hoc\n\n- **Budget 4**: a.")
    assert main([str(tmp_path), "--verdict", "--stage", "retrained"]) == 0
    assert capsys.readouterr().out == "- **Budget 4**: b.\n"
    assert main([str(tmp_path), "--verdict", "--stage", "other"]) == 2
    assert "says nothing of the stage 'other'" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere"), "--verdict"]) == 2


def comparison(folder, heads, *, metric="test_bleu", by_kind=None, quality=20.0):
    """Of 16 heads, with groups of two as the unit of budgets."""
    folder.mkdir()
    (folder / "metrics.json").write_text(json.dumps({"heads": 16, "budgets_by_kind": by_kind or {}}))
    rows = [(0, "dense", "retrained", 8, 16, 30.0), (0, "his", "retrained", heads // 2, heads, quality)]
    table = pd.DataFrame(rows, columns=["seed", "method", "stage", "budget", "heads", metric])
    table.to_csv(folder / "comparison.csv", index=False)
    return str(folder)


def test_budgets_of_different_kinds_are_different_columns(tmp_path, capsys):
    """12 of 16 heads either way: no mean of the two is taken."""
    paths = [comparison(tmp_path / kind, 12, by_kind={6: {kind: 2}}) for kind in ("encoder", "cross")]
    assert main([*paths, "--metric", "test_bleu"]) == 0
    assert "| 12 heads (encoder 2) | 12 heads (cross 2) |" in capsys.readouterr().out


def test_two_experiments_are_not_two_seeds(tmp_path, capsys):
    """Their dense models may be the same."""
    paths = [comparison(tmp_path / name, 12, quality=quality) for name, quality in (("a", 20.0), ("b", 20.5))]
    assert main([*paths, "--metric", "test_bleu"]) == 2
    assert "there are two results of his, retrained, 12 heads, seed 0, and not the same one" in capsys.readouterr().err
    paths[1] = comparison(tmp_path / "c", 8, quality=20.5)
    assert main([*paths, "--metric", "test_bleu"]) == 0


@pytest.mark.parametrize("metrics", ["[]", '{"budgets_by_kind": {"six": {}}}', '{"budgets_by_kind": [6]}'])
def test_damaged_results_are_named(metrics, tmp_path, capsys):
    path = comparison(tmp_path / "a", 12)
    (tmp_path / "a" / "metrics.json").write_text(metrics)
    assert main([path, "--metric", "test_bleu"]) == 2
    assert f"metrics.json or comparison.csv in {path!r} is not as" in capsys.readouterr().err
    assert main(["nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_within_a_time_a_mean_is_over_seeds_however_many_heads_they_keep(tmp_path, capsys):
    """The cell is that of the budget, by the most heads that fit; each of two times has its own."""
    columns = ["seed", "method", "stage", "budget", "heads", "test_accuracy"]
    rows = [(0, "his", "post hoc", 30, 28, 0.9), (1, "his", "post hoc", 30, 27, 0.7), (0, "his", "post hoc", 40, 28, 0.8),
            (1, "his", "post hoc", 40, 28, 0.8), *[(seed, "dense", "post hoc", 72, 72, 0.9) for seed in (0, 1)]]  # fmt: skip
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "comparison.csv", index=False)
    within = {"30": "8 ms", "40": "10 ms"}
    (tmp_path / "metrics.json").write_text(json.dumps({"heads": 72, "budgets_by_kind": {}, "within": within}))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| 72 heads | 40 heads (at most, within 10 ms) | 30 heads (at most, within 8 ms) |" in out
    assert "| his |  | 80.0 ± 0.0 | 80.0 ± 14.1 |" in out


OPTIONS = {
    "seed": 0, "run_dir": "runs/a", "name": "a", "save_every": 200, "average_last": 1, "ckpt_path": None, "methods": "his",
    "model": {"budget": 3, "learning_rate": 1e-3, "gate": "hard-concrete"},
    "data": {"class_path": "Synthetic", "init_args": {"batch_size": 16, "seed": 0, "num_workers": 0}},
    "trainer": {"precision": "32-true", "devices": 1, "enable_progress_bar": True},
    "wandb": {"mode": "auto"}, "launcher": "local", "ray_cpus_per_task": 1,
}  # fmt: skip


def seeds_with(folder, changes, method="his"):
    """Two directories of other seeds, of which the second has other options; a change is a name with dots and its value."""
    folders = [run(folder / name, seed, [(name_of, "post hoc", 18, 0.8 + seed / 100)])
               for name, seed, name_of in (("a", 0, "his"), ("b", 1, method))]  # fmt: skip
    for path, changed in zip(folders, ({}, changes), strict=True):
        options = copy.deepcopy(OPTIONS)
        for name, value in changed.items():
            *within, last = name.split(".")
            place = options
            for part in within:
                place = place[part]
            place[last] = value
        (pathlib.Path(path) / "config.yaml").write_text(yaml.safe_dump(options))
    return folders


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.learning_rate": 2e-3}, "model.learning_rate is 0.001 in the first and 0.002 in the second"),
        ({"data.init_args.batch_size": 32, "trainer.precision": "bf16"}, "data.init_args.batch_size is 16"),
        ({"ckpt_path": "x.ckpt"}, "ckpt_path is None"),
    ],
)
def test_no_mean_is_taken_over_other_options(changes, said, tmp_path, capsys):
    folders = seeds_with(tmp_path, changes)
    assert main(folders) == 2
    assert f"error: {folders[0]!r} and {folders[1]!r} differ in more than their seeds: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seed": 1, "run_dir": "runs/b", "name": "b", "save_every": 10, "wandb.mode": "disabled"},
        {"data.init_args.seed": 3, "data.init_args.num_workers": 4, "trainer.enable_progress_bar": False},
        {"model.budget": 5, "methods": "his,random"},  # told by the columns
        {"launcher": "ray", "ray_cpus_per_task": 2},  # the same tables to the bit
    ],
)
def test_a_mean_is_taken_over_seeds(changes, tmp_path, capsys):
    assert main(seeds_with(tmp_path, changes)) == 0
    assert "| his | 80.5 ± 0.7 |" in capsys.readouterr().out


def test_what_is_known_of_the_truth_is_a_table_of_programs_or_of_methods(tmp_path, capsys):
    rows = [
        (seed, method, 1, 1, recall, recall, recall == 1, recall == 1, program)
        for program, method, seed, recall in [
            ("p", "his", 0, 1.0), ("p", "his", 1, 0.0), ("p", "learned", 0, 1.0), ("p", "learned", 1, 1.0),
            ("q", "his", 0, 0.0), ("q", "his", 1, 0.0), ("q", "learned", 0, 1.0), ("q", "learned", 1, 0.0),
        ]
    ]  # fmt: skip
    columns = ["seed", "method", "budget", "needed", "recall", "precision", "exact", "survives", "program"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "truth.csv", index=False)
    assert main([str(tmp_path), "--truth", "programs", "--methods", "learned,his"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| program | learned | his |", "| --- | --- | --- |", "| p | ✓ | 1/2 |", "| q | 1/2 | ✗ |"
    ]  # fmt: skip
    assert main([str(tmp_path), "--truth", "methods"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| his | 0.25 | 0.25 | 0.25 | 0.25 | 0.00 | 0.75 |", "| learned | 0.75 | 0.75 | 0.75 | 0.75 | 0.00 | 0.25 |"
    ]  # fmt: skip


def test_what_masks_keep_of_facts_is_a_share_of_the_best_mask(tmp_path, capsys):
    rows = [
        (0, "his", 6, 0.3, 0.6, 0.5),
        (1, "his", 6, 0.6, 0.8, 1.0),
        (0, "his", 4, 0.2, 0.4, 0.5),
        (1, "his", 4, 0.2, 0.4, 0.5),
    ]
    columns = ["seed", "method", "budget", "carried", "at_best", "recall"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "interchange.csv", index=False)
    assert main([str(tmp_path), "--truth", "facts"]) == 0
    header, _, row = capsys.readouterr().out.splitlines()
    assert header == "| method | share, 6 heads | share, 4 heads | carriers, 6 heads | carriers, 4 heads |"
    assert row == "| his | 0.62 ± 0.18 | 0.50 ± 0.00 | 0.75 | 0.50 |"


# -- costs of methods --

COSTS = [
    # method, stage, heads, quality, forward, backward
    ("dense", "post hoc", 72, 0.9, 0, 0),
    ("his", "post hoc", 18, 0.8, 2000, 1000), ("his", "post hoc", 9, 0.7, 2000, 1000),
    ("swap", "post hoc", 18, 0.8, 9000, 0), ("swap", "post hoc", 9, 0.7, 12345, 0),
    ("dense", "retrained", 72, 0.9, 7000, 7000),
    ("his", "retrained", 18, 0.9, 9000, 8000), ("his", "retrained", 9, 0.9, 9000, 8000),
    ("swap", "retrained", 18, 0.9, 15000, 6000), ("swap", "retrained", 9, 0.9, 18345, 6000),
]  # fmt: skip


def counted(folder, seed=0, more=0):
    run(folder, seed, [row[:4] for row in COSTS])
    table = pd.read_csv(folder / "comparison.csv")
    selecting = {(row[0], row[2]): row for row in COSTS if row[1] == "post hoc"}
    for place, direction in ((4, "forward"), (5, "backward")):
        table[f"{direction}_examples"] = [row[place] + more for row in COSTS]
        table[f"selection_{direction}_examples"] = [selecting[row[0], row[2]][place] + more for row in COSTS]
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
    assert "| his | 90.0 ± 0.0 | 90.0 ± 0.0 | 2.5 | 1.5 | 7.0 | 7.0 |" in capsys.readouterr().out
    assert main([*runs, "--costs", "--stage", "post hoc", "--methods", "his"]) == 0
    assert "| selection, forward | selection, backward |\n" in capsys.readouterr().out  # nothing is retrained


def test_tables_that_say_no_costs_are_named(tmp_path, capsys):
    assert main([run(tmp_path / "old", 0, [row[:4] for row in COSTS]), "--costs"]) == 2
    assert "do not say what selecting heads took" in capsys.readouterr().err
    assert main([str(tmp_path / "old"), "--truth", "programs", "--costs"]) == 2
