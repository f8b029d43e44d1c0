"""The whole experiment on tags of words, through the command."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForTokenClassification

from gates import load_pruned
from training.config import Source
from training.data.synthetic import build_tokenizer
from training.fit import main
from training.tasks import TokenClassification
from training.tasks.token_classification import entity_counts, entity_f1

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
MODEL = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def write_file(path, rows, seed):
    """Kings and foxes are entities; one after another is one entity."""
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        before = False
        for word in random.choice(["the", "king", "fox", "sees"], size=random.integers(2, 7)):
            inside = word in ("king", "fox")
            lines.append(f"{word}\t{('I-X' if before else 'B-X') if inside else 'O'}")
            before = inside
        lines.append("")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tags")
    build_tokenizer().save_pretrained(folder / "tokenizer")
    files = {name: write_file(folder / f"{name}.conll", rows, rows) for name, rows in (("train", 96), ("test", 48))}
    data = {"train_file": files["train"], "test_file": files["test"], "tokenizer": folder / "tokenizer", "batch_size": 16,
            "score_rows": 32, "metric": "entity_f1"}  # fmt: skip
    model = {"from_scratch": json.dumps(MODEL), "budget": 3, "distil": 0.5, "refit": "true", "learning_rate": 0.005,
             "finetune": 3, "swaps": 6}  # fmt: skip
    options = {f"data.{name}": value for name, value in data.items()}
    options |= {f"model.{name}": value for name, value in model.items()}
    options |= {"retrained": "[his]", "curve": "[]", "trainer.accelerator": "cpu", "wandb.mode": "disabled"}
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert main(["--data", "Tags", *given, "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def test_tables_have_what_follows_from_the_tags_that_were_kept(run):
    table, metrics = pd.read_csv(run / "comparison.csv"), json.loads((run / "metrics.json").read_text())
    assert metrics["main_metric"] == "entity_f1"
    assert 0 < metrics["majority"]["token_accuracy"] < 1
    row = table[(table["method"] == "his") & (table["stage"] == "retrained")].iloc[0]
    kept = np.load(run / "experiments" / row["experiment"] / "predictions.npz")
    predicted, true = ([text.split() for text in kept[f"test_{name}"].tolist()] for name in ("prediction", "target"))
    assert len(true) == 48
    right = [own == gold for tags in zip(predicted, true, strict=True) for own, gold in zip(*tags, strict=True)]
    assert row["test_token_accuracy"] == pytest.approx(np.mean(right), abs=1e-6)
    assert row["test_entity_f1"] == pytest.approx(float(entity_f1(entity_counts(predicted, true, "BIO").sum(0))), abs=1e-6)
    assert row["test_entity_f1"] > 0


def test_the_export_tags_words_in_plain_transformers(run):
    model = load_pruned(run / "export")
    assert isinstance(model, AutoModelForTokenClassification._model_mapping[type(model.config)])
    plain = AutoModelForTokenClassification.from_pretrained(run / "export", trust_remote_code=True).eval()
    assert plain.config.id2label == {0: "B-X", 1: "I-X", 2: "O"}
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits)


def test_the_loss_is_transformers_own_over_a_batch():
    torch.manual_seed(0)
    task = TokenClassification(["O", "B-X", "I-X"], "BIO")
    model = task.build(Source(from_scratch=MODEL), build_tokenizer()).eval()
    labels = torch.tensor([[-100, 0, 1, 2], [-100, 1, -100, -100]])
    batch = {
        "input_ids": torch.tensor([[3, 4, 5, 6], [7, 5, 4, 1]]),
        "attention_mask": torch.ones(2, 4).long(),
        "labels": labels,
    }
    losses, logits = task.losses(model, batch)
    assert (losses.shape, logits.shape) == ((2,), (2, 4, 3))
    torch.testing.assert_close(task.batch_loss(losses, batch), model(**batch).loss)
    assert task.example_weights(batch).tolist() == [3, 1]
    assert task.predictions(logits, batch)[1] == ["O B-X I-X", "B-X"]
