"""The whole experiment on images, on ratings of sentences and on tags of words, through the command."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from transformers import AutoModelForImageClassification, AutoModelForTokenClassification, AutoTokenizer, pipeline
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from gates import load_pruned
from tests.training.data.test_images import VIT, write_images
from training.__main__ import main as command
from training.data.synthetic import build_tokenizer
from training.fit import main
from training.tasks.token_classification import entity_counts, entity_f1

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
BERT = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def fit(folder, kind, data, model):
    """The directory of a run on this kind of data."""
    groups = {"data": data, "model": model, "trainer": {"accelerator": "cpu"}, "wandb": {"mode": "disabled"}}
    options = {f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()}
    options |= {"compare": "full", "retrained": "[his]", "curve": "[]"}
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert main(["--data", kind, *given, "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def files_of(folder, lines_of, *, header=(), ending="tsv", rows=None):
    """Files of generated lines by split."""
    files = {}
    for name, count in (rows or {"train": 96, "test": 48}).items():
        path, random = folder / f"{name}.{ending}", np.random.default_rng(count)
        path.write_text("\n".join([*header, *(line for _ in range(count) for line in lines_of(random))]) + "\n")
        files[name] = str(path)
    build_tokenizer().save_pretrained(folder / "tokenizer")
    return files


def results(run):
    """The row of HIS, retrained, with its predictions and targets on the test split, and the metrics of the run."""
    table, metrics = pd.read_csv(run / "comparison.csv"), json.loads((run / "metrics.json").read_text())
    row = table[(table["method"] == "his") & (table["stage"] == "retrained from dense")].iloc[0]
    kept = np.load(run / "experiments" / row["experiment"] / "predictions.npz")
    return row, kept["test_prediction"], kept["test_target"], metrics


def same_in_plain_transformers(run, auto, inputs):
    """The export as stock Transformers loads it, checked against the pruned model."""
    plain = auto.from_pretrained(run / "export", trust_remote_code=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(inputs).logits, load_pruned(run / "export")(inputs).logits)
    return plain


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rows = {"train": 24, "test": 8}
    data = {f"{name}_folder": write_images(folder / name, ("red", "green", "blue"), count) for name, count in rows.items()}
    model = {"from_scratch": json.dumps(VIT), "budget": 3, "learning_rate": 0.005}
    return fit(folder, "Images", data | {"image_size": 8, "batch_size": 12, "score_rows": 24}, model)


def test_tables_of_images_are_those_of_classes(images):
    row, predicted, true, metrics = results(images)
    assert (metrics["main_metric"], metrics["heads"]) == ("accuracy", 8)
    assert metrics["majority"]["accuracy"] == pytest.approx(1 / 3)
    assert row["test_accuracy"] == pytest.approx((predicted == true).mean())
    assert {site["kind"] for site in json.loads((images / "sites.json").read_text())} == {"encoder"}


def test_the_export_has_its_image_processor(images):
    assert AutoImageProcessor.from_pretrained(images / "export").size["height"] == 8
    plain = same_in_plain_transformers(images, AutoModelForImageClassification, torch.rand(2, 3, 8, 8))
    assert plain.config.id2label == {0: "blue", 1: "green", 2: "red"}


def test_images_have_no_roles_of_words(images, capsys):
    assert command(["analyze", str(images), "--experiments", "roles"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def ratings(tmp_path_factory):
    """How often two sentences have the same word at the same place."""

    def line(random):
        one, other = random.choice(["fox", "king", "basil", "sees"], size=(2, 4)).tolist()
        yield f"{' '.join(one)}\t{' '.join(other)}\t{sum(a == b for a, b in zip(one, other, strict=True))}"

    folder = tmp_path_factory.mktemp("ratings")
    files = files_of(folder, line, header=["one\tother\tlabel"], rows={"train": 96, "test": 48, "more": 40})
    data = {"train_file": files["train"], "test_file": files["test"], "text_column": "one", "pair_column": "other",
            "more_tests": json.dumps({"again": files["test"], "more": files["more"]}), "tokenizer": folder / "tokenizer",
            "batch_size": 16, "score_rows": 32}  # fmt: skip
    model = {"from_scratch": json.dumps(BERT), "budget": 3, "distil": 0.5, "learning_rate": 0.001, "finetune": 2}
    return fit(folder, "Ratings", data, model)


def test_tables_of_ratings_have_both_correlations(ratings):
    row, predicted, true, metrics = results(ratings)
    assert metrics["main_metric"] == "pearson"
    assert "majority" not in metrics
    assert row["test_pearson"] == pytest.approx(stats.pearsonr(predicted, true).statistic, abs=1e-4)
    assert row["test_spearman"] == pytest.approx(stats.spearmanr(predicted, true).statistic, abs=1e-4)
    assert row["test_loss"] == pytest.approx(np.square(predicted - true).mean(), abs=1e-4)


def test_a_pipeline_gives_the_number_that_the_model_predicts(ratings, registered):
    texts = [{"text": "fox king", "text_pair": "fox sees"}, {"text": "basil", "text_pair": "sees king"}]
    answers = pipeline("text-classification", model=str(ratings / "export"))(texts)
    tokenizer = AutoTokenizer.from_pretrained(ratings / "export")
    batch = tokenizer(*zip(*map(dict.values, texts), strict=True), padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = load_pruned(ratings / "export").eval()(**batch).logits[:, 0].tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def tags(tmp_path_factory):
    """Kings and foxes are entities; one after another is one entity."""

    def sentence(random):
        before = False
        for word in random.choice(["the", "king", "fox", "sees"], size=random.integers(2, 7)):
            inside = word in ("king", "fox")
            yield f"{word}\t{('I-X' if before else 'B-X') if inside else 'O'}"
            before = inside
        yield ""

    folder = tmp_path_factory.mktemp("tags")
    data = {f"{name}_file": file for name, file in files_of(folder, sentence, ending="conll").items()}
    data |= {"tokenizer": folder / "tokenizer", "batch_size": 16, "score_rows": 32, "metric": "entity_f1"}
    model = {"from_scratch": json.dumps(BERT), "budget": 3, "distil": 0.5, "learning_rate": 0.005, "finetune": 3, "swaps": 6}
    return fit(folder, "Tags", data, model)


def test_tables_of_tags_follow_from_the_tags_that_were_kept(tags):
    row, *kept, metrics = results(tags)
    assert metrics["main_metric"] == "entity_f1"
    assert 0 < metrics["majority"]["token_accuracy"] < 1
    predicted, true = ([text.split() for text in texts.tolist()] for texts in kept)
    assert len(true) == 48
    right = [own == gold for sentences in zip(predicted, true, strict=True) for own, gold in zip(*sentences, strict=True)]
    assert row["test_token_accuracy"] == pytest.approx(np.mean(right), abs=1e-6)
    assert row["test_entity_f1"] == pytest.approx(float(entity_f1(entity_counts(predicted, true, "BIO").sum(0))), abs=1e-6)
    assert row["test_entity_f1"] > 0


def test_the_export_tags_words_in_plain_transformers(tags):
    plain = same_in_plain_transformers(tags, AutoModelForTokenClassification, torch.tensor([[3, 4, 5, 6]]))
    assert plain.config.id2label == {0: "B-X", 1: "I-X", 2: "O"}
