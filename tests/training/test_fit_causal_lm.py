"""The whole experiment on a language model, through the commands: groups of heads, perplexity, and the cache they cost."""

import json

import pandas as pd
import pytest
import torch

from gates.export.checkpoint import load_pruned
from gates.export.cost import cache_bytes_of
from tests.training.causal_runs import make_data, write_config
from training.commands.table import run_command
from training.fit import main

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
DENSE = 2 * 2 * 2 * 8 * 4
"""Bytes: layers, key heads, keys and values, features, float32."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    more = ["--compare", "full", "--retrained", "[dense,random]", "--curve", "[0.5]", "--model.distil", "0.5"]
    assert main(["--config", write_config(folder), "--run_dir", str(folder / "run"), *more]) == 0
    return folder / "run"


def test_tables_have_perplexities_and_say_that_less_is_better(run):
    table, metrics = pd.read_csv(run / "comparison.csv"), json.loads((run / "metrics.json").read_text())
    names = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "accuracy")
    assert {f"{split}_{name}" for split in ("select", "test") for name in names} <= set(table)
    assert (table["test_perplexity"] > 1).all()
    assert torch.allclose(torch.tensor(table["test_loss"]).exp(), torch.tensor(table["test_perplexity"]), rtol=1e-5)
    assert (metrics["main_metric"], metrics["lower_is_better"]) == ("perplexity", True)
    assert "majority" not in metrics


def test_the_cache_of_dense_and_pruned_is_in_tables_card_and_report(run):
    table = pd.read_csv(run / "comparison.csv").set_index(["method", "stage"])["kv_bytes_per_token"]
    pruned = cache_bytes_of(load_pruned(run / "export"))
    assert table["dense"].tolist() == [DENSE, DENSE]
    assert set(table) == {DENSE, pruned}
    assert pruned == DENSE // 2
    assert f"| bytes of KV cache per token | {DENSE} | {pruned} | 2.00 |" in (run / "export" / "README.md").read_text()
    assert set(pd.read_csv(run / "summary.csv")["kv_bytes_per_token"]) == {DENSE, pruned}
    assert run_command("report", [str(run), "--output", str(run / "report.html")]) == 0
    assert "KV bytes per token" in (run / "report.html").read_text()


def test_the_export_reloads_with_the_perplexity_of_the_table(run):
    data = make_data()
    model = load_pruned(run / "export")
    surprise, tokens = 0.0, 0
    with torch.no_grad():
        for batch in data.test_dataloader():
            own, counted = data.task.predictions(data.task.losses(model.eval(), batch)[1], batch)
            surprise, tokens = surprise + float(own.sum()), tokens + int(counted.sum())
    table = pd.read_csv(run / "comparison.csv").set_index(["method", "stage"])
    expected = table.loc[("learned", "retrained"), "test_perplexity"]
    assert torch.tensor(surprise / tokens).exp() == pytest.approx(expected, rel=1e-4)
