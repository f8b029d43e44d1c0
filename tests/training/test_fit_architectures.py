"""Whole runs on classifiers that are no plain encoders: with a decoder, and with heads that can be gated but not removed."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from gates import load_pruned
from gates.attention.sites import find_attention
from gates.surgery.masks import load_mask
from tests.training.runs import write_config
from training.fit import main

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
SMALL = ["--data.train_rows", "64", "--data.select_rows", "32", "--data.test_rows", "32", "--data.score_rows", "32",
         "--curve", "[]"]  # fmt: skip
STACKS = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}  # fmt: skip
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
DOGE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "num_key_value_heads": 4,
        "max_position_embeddings": 64}  # fmt: skip


def run_of(folder, model, *more):
    config = folder / "fields.yaml"
    text = Path(write_config(folder)).read_text()
    start, end = text.index("  from_scratch:"), text.index("  budget:")
    config.write_text(text[:start] + f"  from_scratch: {json.dumps(model)}\n" + text[end:])
    assert main(["--config", str(config), *SMALL, "--run_dir", str(folder / "run"), *more]) == 0
    return folder / "run"


@pytest.mark.parametrize("model", [{"model_type": "bart", **STACKS}, {"model_type": "t5", **T5}], ids=["bart", "t5"])
def test_a_classifier_with_encoder_and_decoder(model, tmp_path):
    run = run_of(tmp_path, model, "--compare", "posthoc")
    table = pd.read_csv(run / "comparison.csv")
    assert set(table["heads"]) == {3, 12}
    assert sum(site.heads for site in find_attention(load_pruned(run / "export"))) < 12


def test_heads_that_cannot_be_removed_are_zeros_in_the_export(tmp_path, capsys):
    run = run_of(tmp_path, {"model_type": "doge", **DOGE}, "--model.budget", "3")
    said = capsys.readouterr().out
    assert "the closed heads are zeros in the pruned model and were not removed: heads of DogeAttention" in said
    model = AutoModelForSequenceClassification.from_pretrained(run / "export")
    sites = find_attention(model)
    mask = load_mask(run / "export" / "mask.json", sites)
    assert (mask.numel(), int(mask.sum())) == (8, 3)
    for site, kept in zip(sites, mask.split([site.heads for site in sites]), strict=True):
        blocks = site.output.weight.unflatten(1, (site.heads, -1)).abs().sum(dim=(0, 2))
        assert torch.equal(blocks > 0, kept > 0)
