"""What is computed from rows, and written beside them."""

import json

import numpy as np
import pandas as pd

from tests.training.comparison.rows import make_row
from tests.training.runs import make_data
from tests.training.translation_runs import make_data as make_translation_data
from training.comparison.methods import RIVALS
from training.comparison.tables import Results, sample_translations


def test_scores_of_gates_stand_beside_the_rankings_made_of_them(compared):
    run, _ = compared
    scores = pd.read_csv(run / "scores.csv")
    assert scores.columns[:6].tolist() == ["seed", "gate", "site", "kind", "layer", "head"]
    assert scores["site"].tolist() == ["encoder.0"] * 4 + ["encoder.1"] * 4
    assert scores["head"].tolist() == [0, 1, 2, 3] * 2
    assert {"his", "entropy", "fisher"} <= set(scores)
    assert {f"ranking:{name}" for name in ("learned", *RIVALS)} == {name for name in scores if name.startswith("ranking:")}
    order = (-scores["entropy"]).argsort(kind="stable").tolist()
    assert (-scores["ranking:entropy"]).argsort(kind="stable").tolist() == order[::-1]


def test_sites_and_metrics_say_what_rows_are_of(compared):
    run, _ = compared
    sites = json.loads((run / "sites.json").read_text())
    assert [(site["label"], site["heads"], site["gates"]) for site in sites] == [("encoder.0", 4, 4), ("encoder.1", 4, 4)]
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["methods"] == ["learned", *RIVALS]
    assert metrics["ours"] == ["learned"]
    assert (metrics["main_metric"], metrics["budgets"], metrics["seeds"]) == ("accuracy", [3], [0])
    assert "run" not in metrics


def results_of(data, *rows):
    return Results(rows=[make_row(*row) for row in rows], data=data)


def test_samples_are_of_the_first_seed_and_of_whole_splits():
    data = make_translation_data()
    pairs = data.texts["test"]
    texts = {key: {"test_prediction": np.array([f"{key} {n}" for n in range(len(pairs.source))])} for key in "abc"}
    results = results_of(
        data, (3, "dense", "retrained", 8, "a"), (3, "his", "post hoc", 4, "b"), (4, "his", "post hoc", 4, "c")
    )
    found = sample_translations(results, texts)
    assert found.columns.tolist() == ["source", "reference", "dense.retrained.8", "his.post hoc.4"]
    assert len(found) == 20
    assert found["his.post hoc.4"].tolist() == [f"b {n}" for n in range(20)]
    texts["b"] = {"test_prediction": texts["b"]["test_prediction"][:-1]}
    assert sample_translations(results, texts) is None


def test_classes_have_no_samples():
    assert sample_translations(results_of(make_data(), (0, "dense", "post hoc", 8, "a")), {"a": {}}) is None
