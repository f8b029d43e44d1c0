"""The whole experiment on images, through the command."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForImageClassification
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from gates import load_pruned
from tests.training.data.test_images import VIT, write_images
from training.__main__ import main as command
from training.fit import main

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    data = {name: write_images(folder / name, ("red", "green", "blue"), rows) for name, rows in (("train", 24), ("test", 8))}
    options = {f"data.{name}_folder": path for name, path in data.items()}
    options |= {"data.image_size": 8, "data.batch_size": 12, "data.score_rows": 24, "model.from_scratch": json.dumps(VIT),
                "model.budget": 3, "model.learning_rate": 0.005, "model.refit": "true", "retrained": "[his]", "curve": "[]",
                "trainer.accelerator": "cpu", "wandb.mode": "disabled"}  # fmt: skip
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    assert main(["--data", "Images", *given, "--run_dir", str(folder / "run")]) == 0
    return folder / "run"


def test_tables_are_those_of_classes(run):
    table, metrics = pd.read_csv(run / "comparison.csv"), json.loads((run / "metrics.json").read_text())
    assert (metrics["main_metric"], metrics["heads"]) == ("accuracy", 8)
    assert metrics["majority"]["accuracy"] == pytest.approx(1 / 3)
    row = table[(table["method"] == "his") & (table["stage"] == "retrained")].iloc[0]
    kept = np.load(run / "experiments" / row["experiment"] / "predictions.npz")
    assert row["test_accuracy"] == pytest.approx((kept["test_prediction"] == kept["test_target"]).mean())
    assert {site["kind"] for site in json.loads((run / "sites.json").read_text())} == {"encoder"}


def test_the_export_has_its_processor_and_says_the_same_in_plain_transformers(run):
    own, processor = load_pruned(run / "export"), AutoImageProcessor.from_pretrained(run / "export")
    plain = AutoModelForImageClassification.from_pretrained(run / "export", trust_remote_code=True).eval()
    assert processor.size["height"] == 8
    assert plain.config.id2label == {0: "blue", 1: "green", 2: "red"}
    pixels = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(plain(pixels).logits, own(pixels).logits)


def test_roles_of_words_are_refused(run, capsys):
    assert command(["analyze", str(run), "--experiments", "roles"]) == 2
    assert "Traceback" not in capsys.readouterr().err
