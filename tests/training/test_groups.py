"""Gates on key/value groups, through the command."""

import json

import pandas as pd
import pytest

from gates.attention.sites import find_attention
from gates.export.checkpoint import load_pruned
from tests.training.runs import write_config
from training.fit import main

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
GROUPED = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    backbone = "{" + ", ".join(f"{name}: {value}" for name, value in GROUPED.items()) + "}"
    arguments = ["--config", write_config(folder), "--model.from_scratch", backbone, "--model.unit", "group"]
    more = ["--model.budget", "2", "--compare", "full", "--retrained", "[his]", "--curve", "[]"]
    assert main([*arguments, *more, "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def test_whole_groups_stay_and_go(run):
    masks = {path.stem: path for path in (run / "masks").glob("*.json")}
    assert len(masks) > 2
    for method, path in masks.items():
        kept = [site["kept"] for site in json.loads(path.read_text())["sites"]]
        assert sum(map(len, kept)) == (8 if method == "dense" else 4)
        assert all(heads in ([], [0, 1], [2, 3], [0, 1, 2, 3]) for heads in kept)


def test_the_export_has_one_key_head_for_two_query_heads(run):
    sites = find_attention(load_pruned(run / "export"))
    assert sum(site.heads for site in sites) == 4
    assert sum(site.kv_heads for site in sites) == 2


def test_tables_count_heads_and_scores_gates(run):
    table = pd.read_csv(run / "comparison.csv")
    assert set(table["heads"]) == {4, 8}
    scores = pd.read_csv(run / "scores.csv")
    assert scores["gate"].tolist() == [0, 1, 2, 3]
    assert scores["head"].tolist() == [0, 1, 0, 1]  # a row for each gate, numbered within its site
    assert (scores["his"] > 0).all()
    sites = json.loads((run / "sites.json").read_text())
    assert [(site["heads"], site["gates"]) for site in sites] == [(4, 2), (4, 2)]
    metrics = json.loads((run / "metrics.json").read_text())
    assert (metrics["heads"], metrics["gates"], metrics["unit"]) == (8, 4, "group")
    assert metrics["run"]["kept"] == sum(metrics["run"]["by_site"].values()) == 4
