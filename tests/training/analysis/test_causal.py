"""Facilitating, irrelevant and interfering heads of a run's model."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from gates.search.causal_gating import ROLES
from tests.training.analysis.models import make_dense
from training.analysis import heads as causal
from training.analysis.heads import causal_classes
from training.analysis.model import outcomes
from training.commands.table import run_command


@pytest.fixture(scope="module")
def dense():
    return make_dense()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(causal, "GATING_STEPS", 4)
    monkeypatch.setattr(causal, "SEEDS", (0, 1))


@pytest.mark.usefixtures("quick")
def test_each_gate_has_a_role_and_each_role_is_closed_at_once(dense):
    before = {name: tensor.clone() for name, tensor in dense.backbone.state_dict().items()}
    finding = causal_classes(dense)
    table, closed = finding.tables["causal"], finding.tables["causal_closed"]
    assert list(table["gate"]) == list(range(8))
    assert set(table["role"]) <= set(ROLES)
    assert set(table["agreement"]) <= {0.5, 1.0}
    assert list(closed["role"]) == list(ROLES)
    assert closed["gates"].sum() == 8
    for _, row in closed.iterrows():
        mask = torch.tensor((table["role"] != row["role"]).to_numpy(), dtype=torch.float)
        expected = outcomes(dense, torch.stack([torch.ones(8), mask]), "test")
        assert row["metric"] == pytest.approx(expected.values[1])
        assert row["loss_change"] == pytest.approx(expected.losses[1].mean() - expected.losses[0].mean(), abs=1e-6)
        assert row["gates"] > 0 or row["change"] == 0
    assert finding.sentences[0].startswith("Of 8 heads, ")
    assert len(finding.sentences) == 1 + (closed["gates"] > 0).sum()
    assert sum(finding.numbers["roles"].values()) == 8
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.backbone.state_dict().items())


@pytest.mark.usefixtures("quick")
def test_heads_without_effect_are_irrelevant(monkeypatch):
    monkeypatch.setattr(causal, "GATING_STEPS", 12)
    dense = make_dense()
    with torch.no_grad():
        for layer in dense.backbone.bert.encoder.layer:
            layer.attention.output.dense.weight[:, :4] = 0  # the first head of each layer
    table = causal_classes(dense).tables["causal"]
    assert set(table.loc[table["head"] == 0, "role"]) == {"irrelevant"}


@pytest.mark.integration
@pytest.mark.usefixtures("quick")
def test_the_command_writes_roles_and_relevance(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert run_command("analyze", [str(run), "--run_dir", str(out), "--experiments", "causal,relevance"]) == 0
    assert {path.name for path in out.iterdir()} == {
        "causal.csv", "causal_closed.csv", "relevance.csv", "plots", "metrics.json", "analysis.md",
    }  # fmt: skip
    assert {path.stem for path in (out / "plots").iterdir()} == {"causal", "relevance"}
    table = pd.read_csv(out / "relevance.csv")
    for name in ("relevance", "gradient_x_input"):
        np.testing.assert_allclose(table.groupby("site")[name].sum(), 1, atol=1e-6)
        assert (table[f"{name}_signed"].abs() <= table[name] + 1e-9).all()
    found = json.loads((out / "metrics.json").read_text())["experiments"]["relevance"]["numbers"]["spearman"]
    assert found["relevance and his"] == pytest.approx(table["relevance"].corr(table["his"], method="spearman"))
    assert set(found) == {"relevance and gradient_x_input", "relevance and his", "gradient_x_input and his"}
    shown = capsys.readouterr().out
    assert "Rank correlations (Spearman) over all heads" in shown
    assert "2 seeds agree on the role of" in shown
