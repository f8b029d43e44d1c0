"""The whole experiment on sentences with a number each, through the command."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from transformers import AutoTokenizer, pipeline

from gates import load_pruned
from training.data.synthetic import build_tokenizer
from training.fit import main

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
WORDS = ["fox", "king", "basil", "sees"]
MODEL = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def write_file(path, rows, seed):
    """How often two sentences have the same word at the same place."""
    random = np.random.default_rng(seed)
    lines = ["one\tother\tlabel"]
    for _ in range(rows):
        one, other = random.choice(WORDS, size=(2, 4)).tolist()
        lines.append(f"{' '.join(one)}\t{' '.join(other)}\t{sum(a == b for a, b in zip(one, other, strict=True))}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ratings")
    build_tokenizer().save_pretrained(folder / "tokenizer")
    files = {name: write_file(folder / f"{name}.tsv", rows, rows) for name, rows in (("train", 96), ("test", 48), ("more", 40))}
    more = json.dumps({"again": files["test"], "more": files["more"]})
    data = {"train_file": files["train"], "test_file": files["test"], "text_column": "one", "pair_column": "other",
            "more_tests": more, "tokenizer": folder / "tokenizer", "batch_size": 16, "score_rows": 32}  # fmt: skip
    model = {"from_scratch": json.dumps(MODEL), "budget": 3, "distil": 0.5, "learning_rate": 0.001, "finetune": 2}
    options = {f"data.{name}": value for name, value in data.items()}
    options |= {f"model.{name}": value for name, value in model.items()}
    options |= {"retrained": "[his]", "curve": "[]", "trainer.accelerator": "cpu", "wandb.mode": "disabled"}
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert main(["--data", "Ratings", *given, "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def test_tables_have_both_correlations_of_what_was_predicted(run):
    table, metrics = pd.read_csv(run / "comparison.csv"), json.loads((run / "metrics.json").read_text())
    assert metrics["main_metric"] == "pearson"
    assert "majority" not in metrics
    row = table[(table["method"] == "his") & (table["stage"] == "retrained")].iloc[0]
    kept = np.load(run / "experiments" / row["experiment"] / "predictions.npz")
    predicted, true = kept["test_prediction"], kept["test_target"]
    assert row["test_pearson"] == pytest.approx(stats.pearsonr(predicted, true).statistic, abs=1e-4)
    assert row["test_spearman"] == pytest.approx(stats.spearmanr(predicted, true).statistic, abs=1e-4)
    assert row["test_loss"] == pytest.approx(np.square(predicted - true).mean(), abs=1e-4)


def test_a_pipeline_gives_the_number_that_the_model_predicts(run, registered):
    model = load_pruned(run / "export")
    texts = [{"text": "fox king", "text_pair": "fox sees"}, {"text": "basil", "text_pair": "sees king"}]
    answers = pipeline("text-classification", model=str(run / "export"))(texts)
    batch = AutoTokenizer.from_pretrained(run / "export")(
        *zip(*map(dict.values, texts), strict=True), padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model.eval()(**batch).logits[:, 0].tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(expected, abs=1e-5)
