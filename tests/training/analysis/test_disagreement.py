"""HIS against entropy with roles, on scores that are made for it."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.training.analysis.test_survival import write_roles, write_run
from training.analysis.disagreement import BROAD, FOCUSED, disagreement
from training.commands.table import run_command

HIS = [8, 7, 6, 5, 4, 3, 2, 1]
ENTROPY = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6]


def write_comparison(folder, his=HIS, entropy=ENTROPY, masks=(), results=(), seeds=(0, 1)):
    """A comparison with equal layer norms, so that normalised HIS has the order of the raw one within a layer."""
    write_run(folder, [("dense", 8, 0, [1] * 8), *masks])
    rows = [
        {
            "seed": seed, "gate": gate, "site": f"encoder.{gate // 4}", "kind": "encoder", "layer": gate // 4, "head": gate % 4,
            "his": his[gate], "entropy": entropy[gate],
        }
        for seed in seeds
        for gate in range(8)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "scores.csv", index=False)
    columns = ["seed", "method", "stage", "budget", "heads", "test_accuracy"]
    table = [(seed, "dense", "post hoc", 8, 8, 0.9) for seed in seeds] + list(results)
    pd.DataFrame(table, columns=columns).to_csv(folder / "comparison.csv", index=False)
    return folder


def test_ranks_quadrants_and_roles(tmp_path):
    found = disagreement(str(write_comparison(tmp_path / "run")), write_roles(tmp_path))
    heads = found.tables["disagreement"]
    assert heads["entropy_rank"].tolist() == [8, 1, 7, 2, 6, 3, 5, 4]
    by_layer = [np.array(HIS[:4]) / np.linalg.norm(HIS[:4]), np.array(HIS[4:]) / np.linalg.norm(HIS[4:])]
    np.testing.assert_allclose(heads["his"], np.concatenate(by_layer))
    order = np.argsort(-np.concatenate(by_layer))
    assert heads["his_rank"].iloc[order].tolist() == list(range(1, 9))
    important = heads["his_rank"] <= 4
    broad = heads["entropy_rank"] <= 4
    for (_, row), high, wide in zip(heads.iterrows(), important, broad, strict=True):
        assert row["quadrant"] == f"{'important' if high else 'unimportant'}, {'broad' if wide else 'focused'}"
    quadrants = found.tables["disagreement_quadrants"]
    assert quadrants["heads"].sum() == 8
    assert quadrants["specialised"].sum() == quadrants["syntactic"].sum() == 3
    expected = pd.Series(np.concatenate(by_layer)).corr(pd.Series(ENTROPY), method="spearman")
    assert found.tables["disagreement_correlation"]["spearman"].iloc[0] == pytest.approx(expected)
    assert "disagreement" in found.figures


@pytest.mark.parametrize(("direction", "kept"), [(FOCUSED, [0, 2, 4, 6]), (BROAD, [1, 3, 5, 7])])
def test_the_sum_in_the_direction_of_the_kept_heads_tells_more(tmp_path, direction, kept):
    """Learned gates that keep exactly the focused or exactly the broad heads, whatever their HIS."""
    masks = [("learned", 4, seed, [int(gate in kept) for gate in range(8)]) for seed in (0, 1)]
    found = disagreement(str(write_comparison(tmp_path / "run", masks=masks)), write_roles(tmp_path))
    table = found.tables["disagreement_combined"].set_index("score")
    alone = {FOCUSED: "entropy-high-first", BROAD: "entropy-low-first"}
    for name, score in {FOCUSED: "rank-sum", BROAD: "rank-sum-broad"}.items():
        assert (table.loc[score, "beyond_his"] > 0) == (name == direction)
        assert table.loc[alone[name], "ahead"] == (1.0 if name == direction else 0.0)
    assert set(table["seeds"]) == {2}


def test_results_against_his_seed_by_seed(tmp_path):
    accuracies = {"his": (0.70, 0.72, 0.74), "hies": (0.71, 0.74, 0.77), "rank-sum-broad": (0.69, 0.71, 0.73)}
    results = [(s, name, "post hoc", 4, 4, value) for name, values in accuracies.items() for s, value in enumerate(values)]
    run = write_comparison(tmp_path / "run", results=results, seeds=(0, 1, 2))
    found = disagreement(str(run), write_roles(tmp_path))
    table = found.tables["disagreement_quality"].set_index("method")
    assert table.loc["hies", "difference"] == pytest.approx(0.02)
    assert table.loc["hies", "low"] == pytest.approx(0.02 - 4.302653 * 0.01 / 3**0.5)
    assert table.loc["rank-sum-broad", "difference"] == pytest.approx(-0.01)
    assert table.loc["rank-sum-broad", "direction"] == BROAD
    assert any("hies, which speaks for focused heads, less that of HIS: 2.00 %" in one for one in found.sentences)


def test_bad_input_is_one_sentence(tmp_path, capsys):
    run, roles = write_comparison(tmp_path / "run"), write_roles(tmp_path)
    plain = write_comparison(tmp_path / "plain")
    pd.read_csv(plain / "scores.csv").drop(columns="entropy").to_csv(plain / "scores.csv", index=False)
    (tmp_path / "no").mkdir()
    pd.read_csv(roles)[:4].to_csv(tmp_path / "fewer.csv", index=False)
    for where, file, message in (
        (run, str(tmp_path / "nowhere.csv"), "there are no roles in"),
        (plain, roles, "has no scores.csv with HIS and entropy"),
        (tmp_path / "no", roles, "holds neither a comparison nor a run"),
        (run, str(tmp_path / "fewer.csv"), "the roles have 0 heads of encoder.1"),
    ):
        arguments = [str(where), "--experiments", "disagreement", "--roles", file, "--run_dir", str(tmp_path / "out")]
        assert run_command("analyze", arguments) == 2
        error = capsys.readouterr().err
        assert message in error.splitlines()[-1]
        assert error.splitlines()[-1].startswith("error: ")
    arguments = [str(run), "--experiments", "disagreement", "--roles", roles, "--run_dir", str(tmp_path / "out")]
    assert run_command("analyze", arguments) == 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["experiments"]["disagreement"]["numbers"]["heads"] == 8
