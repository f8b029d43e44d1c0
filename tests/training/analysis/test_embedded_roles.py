"""Trained models of the generated language: arcs, carriers and masks, by hand on planted tables and through the command."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from training.analysis import embedded_roles
from training.analysis.embedded_roles import CARRIERS, OTHERS, fact_table, method_table
from training.commands.table import run_command
from training.config.data import KnownTruth
from training.stats.odds import Table, exact_odds

EFFECTS = {"agree?": [0.6, 0.2, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0], "rare?": [0.0, 0.0, 0.0, 0.5, -0.3, 0.0, 0.0, 0.0]}


def heads_of(seed=0):
    """Eight heads: three carriers, two of them with an arc of what they carry, and one other head with an arc."""
    carries = ["agree?", "agree?", "none", "rare?", "none", "none", "none", "none"]
    roles = ["arc, arc of agree?", "none", "broad", "arc, arc of agree?, arc of rare?", "arc, arc of rare?", *["none"] * 3]
    table = pd.DataFrame({"seed": seed, "head": range(8), "carries": carries, "roles": roles})
    table["group"] = [OTHERS if name == "none" else CARRIERS for name in carries]
    return table.assign(**{"agree?_effect": EFFECTS["agree?"], "rare?_effect": EFFECTS["rare?"], "order?_effect": np.nan})


def test_how_many_heads_look_and_carry():
    table = fact_table(heads_of()).set_index("question")
    assert list(table.index) == ["any", "agree?", "rare?"]  # the other one was not learned
    assert table.loc["any", ["with_arc", "carriers", "both"]].tolist() == [3, 3, 2]
    assert table.loc["agree?", ["with_arc", "carriers", "both"]].tolist() == [2, 2, 1]
    assert table.loc["rare?", ["with_arc", "carriers", "both"]].tolist() == [2, 1, 1]
    assert table.loc["any", "arcs_that_carry"] == pytest.approx(2 / 3)
    assert table.loc["any", "others_that_carry"] == pytest.approx(1 / 5)
    assert table.loc["any", "arcs_that_carry_low"] < 2 / 3 < table.loc["any", "arcs_that_carry_high"]
    expected = exact_odds(Table(2, 1, 1, 4))
    np.testing.assert_allclose(table.loc["any", ["odds_ratio", "odds_low", "odds_high"]].astype(float), expected)


def test_without_an_arc_there_is_no_share_of_heads_that_have_one():
    heads = heads_of().assign(roles="none")
    row = fact_table(heads).set_index("question").loc["any"]
    assert np.isnan(row["arcs_that_carry"])
    assert row["others_that_carry"] == pytest.approx(3 / 8)


def test_what_methods_keep_of_heads_with_an_arc_and_of_carriers():
    heads = pd.concat([heads_of(0), heads_of(1)], ignore_index=True)
    masks = {
        ("his", 2): {0: np.array([1, 1, 0, 0, 0, 0, 0, 0.0]), 1: np.array([1, 0, 0, 0, 1, 0, 0, 0.0])},
        ("learned", 4): {0: np.array([1, 1, 0, 1, 1, 0, 0, 0.0]), 7: np.zeros(8)},  # a seed that has learned nothing
    }
    table = method_table(heads, masks).set_index(["method", "heads"])
    assert table.loc[("his", "with an arc"), "kept"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert table.loc[("his", "with an arc"), "recall"] == pytest.approx((1 / 2 + 1) / 2)
    assert table.loc[("his", "carriers"), "kept"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert 0 < table.loc[("his", "carriers"), "low"] < 0.5 < table.loc[("his", "carriers"), "high"] < 1
    assert table.loc[("his", "neither"), ["kept", "number"]].tolist() == [0, 4]
    assert table.loc[("learned", "carriers"), ["seeds", "kept", "recall"]].tolist() == [1, 1, 1]
    assert np.isnan(table.loc[("learned", "carriers"), "low"])


def call(run, out, *more):
    return run_command("analyze", [str(run), "--experiments", "known-roles", "--run_dir", str(out), *more])


@pytest.fixture
def quick(monkeypatch):
    """Few sentences, and effects that so short a training would not give."""
    monkeypatch.setattr(embedded_roles, "ROWS", 120)
    monkeypatch.setattr(embedded_roles, "effects_on", lambda subject, data: EFFECTS)


@pytest.mark.usefixtures("quick")
def test_a_comparison_and_a_run_have_the_same_tables(compared, full_run, tmp_path, capsys):
    found = {}
    for name, run in (("comparison", compared[0]), ("run", full_run[0])):
        before = sorted(path.name for path in run.rglob("*"))
        assert call(run, tmp_path / name) == 0
        assert sorted(path.name for path in run.rglob("*")) == before
        found[name] = {path.stem: pd.read_csv(path) for path in (tmp_path / name).glob("*.csv")}
        assert "1 model; an arc leads to a word" in " ".join(capsys.readouterr().out.split())
    names = {f"known_roles{part}" for part in ("", "_heads", "_methods", "_arcs", "_facts")}
    assert found["comparison"].keys() == found["run"].keys() == names
    heads = found["comparison"]["known_roles_heads"]
    assert len(heads) == 8
    assert heads["carries"].tolist() == ["agree?", "agree?", "none", "rare?", "none", "none", "none", "none"]
    assert heads["order?_effect"].isna().all()
    pd.testing.assert_frame_equal(heads, found["run"]["known_roles_heads"])  # one seed, one dense model
    arcs = found["comparison"]["known_roles_arcs"].set_index("arc")
    assert arcs.loc["marker to marked", "baseline"] == 1  # which is always one word before
    assert arcs.loc["answer to rare", "baseline"] < 0.5
    assert arcs.loc["answer to rare", "best_share"] == heads["answer to rare_share"].max()
    assert arcs["heads"].sum() == heads["arcs"].replace("none", np.nan).dropna().str.split(", ").map(len).sum()
    groups = found["comparison"]["known_roles"].set_index(["group", "role"])["heads"]
    assert (groups[CARRIERS] == 3).all()
    methods = found["comparison"]["known_roles_methods"]
    assert {"learned", "his", "random"} <= set(methods["method"])
    assert set(methods["budget"]) == {3}


@pytest.mark.usefixtures("quick")
def test_models_that_have_learned_nothing_or_are_gone_are_refused(compared, tmp_path, monkeypatch, capsys):
    run = compared[0]
    monkeypatch.setattr(embedded_roles, "effects_on", lambda subject, data: {})
    assert call(run, tmp_path / "out") == 2
    assert "answers a question right in 60% of the cases" in capsys.readouterr().err
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "masks.json", "sites.json"):
        (copy / name).write_text((run / name).read_text())
    assert call(copy, tmp_path / "out") == 2
    assert "the dense model of seed 0 with these data and options is not among the experiments in" in capsys.readouterr().err
    (copy / "masks.json").unlink()
    assert call(copy, tmp_path / "out") == 2
    assert "has no masks.json and sites.json" in capsys.readouterr().err


def test_other_data_have_no_arcs(compared, tmp_path, monkeypatch, capsys):
    subject = SimpleNamespace(data=SimpleNamespace(options=KnownTruth()))
    monkeypatch.setattr(embedded_roles, "dense_of_seeds", lambda run, overrides: iter([(0, subject)]))
    assert call(compared[0], tmp_path / "out") == 2
    assert "is of KnownTruth, which has no gold arcs" in capsys.readouterr().err
