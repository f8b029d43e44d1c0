"""The whole experiment on the generated language pair, through the commands."""

import csv
import json
import os
import subprocess
import sys
from functools import partial

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from tests.training.runs import run_fit
from tests.training.translation_runs import make_data, read_texts, write_config
from training.commands.table import run_command
from training.fit import main
from training.report.pictures import pictures_of
from training.report.reading import read_contents

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("undrawn")]
export = partial(run_command, "export")
translate = partial(run_command, "translate")

REPRODUCE = """
import json, sys, torch
sys.modules["gates"] = sys.modules["training"] = None
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
sources = open(sys.argv[2], encoding="utf-8").read().split(chr(10))[:-1]
for source in sources:
    tokens = tokenizer(source, return_tensors="pt")
    longest = min(40, 2 * tokens["input_ids"].shape[1] + 10)
    ids = model.generate(**tokens, num_beams=4, max_new_tokens=longest, max_length=None)
    print(" ".join(tokenizer.decode(ids[0], skip_special_tokens=True).split()))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with everything: encoder heads with the decoder fixed, compared, and a control from scratch."""
    folder = tmp_path_factory.mktemp("translation")
    more = ["--compare", "full", "--retrained", "[dense,random]", "--from_scratch", "[learned]"]
    averaged = ["--average_last", "2", "--average_every", "2"]
    assert fit(folder, *more, *averaged) == 0
    return folder / "run"


def fit(folder, *arguments, run_dir="run"):
    """Run the command with the small configuration; its exit code."""
    return main(["--config", write_config(folder), "--run_dir", str(folder / run_dir), *arguments])


def weights(run, name):
    """The weights in a checkpoint of a run."""
    state = torch.load(run / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
    return {name: tensor for name, tensor in state.items() if "_extra_state" not in name}


DENSE = ["--model.budget", "null", "--model.prune", "0", "--model.retrain", "0"]
"""Options that train a dense model alone."""


def test_methods_are_compared_in_bleu_at_equal_steps(run):
    table = pd.read_csv(run / "comparison.csv")
    assert {"select_bleu", "test_bleu", "test_chrf", "test_beam_bleu", "test_beam_chrf"} <= set(table.columns)
    contents = read_contents(run)
    assert contents.metric == "bleu"
    assert "curve" in {picture.name for picture in pictures_of(contents)}
    retrained = table[table["stage"] == "retrained"].set_index("method")
    assert set(retrained.index) == {"dense", "learned", "random"}
    assert retrained["steps"].nunique() == 1
    assert retrained.loc["learned", "heads"] == retrained.loc["random", "heads"] == 3 + 4 + 4
    scratch = table[table["stage"] == "from scratch"].iloc[0]
    assert scratch["heads"] == 11
    # Fine-tuning's steps too, and those that the mask was learned in.
    assert scratch["steps"] == round(retrained.loc["learned", "steps"] * 3 / 2) + retrained.loc["learned", "steps"] / 2


def test_the_budget_is_of_encoder_heads_and_the_decoder_has_not_moved(run):
    metrics = json.loads((run / "metrics.json").read_text())
    kept = metrics["run"]["by_site"]
    assert sum(count for site, count in kept.items() if site.startswith("encoder")) == 3
    assert all(count == 4 for site, count in kept.items() if not site.startswith("encoder"))
    dense, final = weights(run, "dense"), weights(run, "final")
    moved = {name for name in dense if not torch.equal(dense[name], final[name])}
    assert not [name for name in moved if "decoder" in name or "shared" in name or "lm_head" in name]
    assert [name for name in moved if "encoder.layers" in name]


def test_translations_are_kept_and_their_differences_tested(run):
    folder = run / "translations"
    data = make_data()
    assert read_texts(folder / "reference.txt") == data.texts["test"].target
    for system in ("dense.retrained", "learned.retrained", "random.post hoc", "learned.from scratch"):
        for search in ("greedy", "beam"):
            assert len(read_texts(folder / f"{system}.{search}.txt")) == 24
    with open(run / "samples.tsv", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    assert rows[3]["source"] == data.texts["test"].source[3]
    table = pd.read_csv(folder / "significance.csv")
    assert set(table["baseline"]) == {"dense.retrained"}
    row = table[(table["system"] == "learned.retrained") & (table["search"] == "greedy")].iloc[0]
    own = pd.read_csv(run / "comparison.csv").query("method == 'learned' and stage == 'retrained'").iloc[0]
    assert row["bleu"] == pytest.approx(own["test_bleu"], rel=1e-4)
    assert "version:" in json.loads((run / "metrics.json").read_text())["signatures"]["bleu"]


def test_the_export_translates_the_same_where_this_project_is_not_installed(run, tmp_path):
    source = run / "translations" / "source.txt"
    command = [sys.executable, "-c", REPRODUCE, str(run / "export"), str(source)]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    assert done.stdout.split("\n")[:-1] == read_texts(run / "translations" / "learned.retrained.beam.txt")


def test_systems_are_translated_and_compared_by_a_command(run, tmp_path, capsys):
    masked = str(tmp_path / "dense")
    assert export([str(run / "checkpoints" / "dense.ckpt"), "--format", "masked", "--budget", "16", "--output", masked]) == 0
    files = ["--source", str(run / "translations" / "source.txt"), "--reference", str(run / "translations" / "reference.txt")]
    as_in_the_run = ["--max_length", "40", "--samples", "50"]
    assert translate([masked, str(run), *files, *as_in_the_run, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "run.txt").read_text() == (run / "translations" / "learned.retrained.beam.txt").read_text()
    scores = pd.read_csv(tmp_path / "out" / "scores.csv").set_index("system")
    own = pd.read_csv(run / "comparison.csv").query("method == 'learned' and stage == 'retrained'").iloc[0]
    assert scores.loc["run", "bleu"] == pytest.approx(own["test_beam_bleu"], rel=1e-4)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--patience", "2"], "--patience is for a dense model alone"),
        (
            ["--compare", "full", "--from_scratch", "[learned]", "--model.finetune", "0"],
            "give the epochs of the dense model's training",
        ),
        (["--model.prune", "0"], "set retrain to 0 and budget to null"),
        (["--model.freeze_while_pruning", "[nothing]"], "'nothing' matches no parameter"),
        (["--data.max_length", "10"], "more than 10"),
        (["--model.from_scratch.max_position_embeddings", "30"], "max_length is 40, but the encoder of the new model has 30"),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(arguments, said, tmp_path, capsys):
    assert fit(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert not (tmp_path / "run").exists()


def test_sources_and_translations_as_long_as_the_model_has_positions(run, tmp_path, capsys):
    (tmp_path / "source.txt").write_text("the " * 40 + "\n")  # with the end token the model's 41 positions
    common = [str(run), "--source", str(tmp_path / "source.txt"), "--beams", "1"]
    assert translate(common) == 0  # by default up to 128 tokens, where the model ends none before
    (tmp_path / "source.txt").write_text("the " * 41 + "\n")
    capsys.readouterr()
    assert translate(common) == 2
    assert "has 42 tokens, more than the 41 positions" in capsys.readouterr().err


def test_the_best_dense_model_is_kept_and_runs_start_from_it(tmp_path):
    """Also if training reaches its end without an improvement."""
    early = ["--patience", "5", "--model.freeze_while_pruning", "null", "--data.validate_every", "0.5"]
    assert fit(tmp_path, *DENSE, "--model.finetune", "2", *early, run_dir="dense") == 0
    dense = weights(tmp_path / "dense", "dense")
    torch.testing.assert_close(dense, weights(tmp_path / "dense", "final"), rtol=0, atol=0)
    assert "no pruning: the dense model" in (tmp_path / "dense" / "export" / "README.md").read_text()
    start = ["--model.from_scratch", "null", "--model.backbone", str(tmp_path / "dense" / "export"), "--model.finetune", "0"]
    assert fit(tmp_path, *start, run_dir="pruned") == 0
    metrics = json.loads((tmp_path / "pruned" / "metrics.json").read_text())
    assert metrics["run"]["kept"] == 3 + 4 + 4
    trained = {name: tensor for name, tensor in dense.items() if name.startswith("backbone.")}
    started = weights(tmp_path / "pruned", "dense")
    torch.testing.assert_close({name: started[name] for name in trained}, trained, rtol=0, atol=0)
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / run / "tokenizer") for run in ("dense", "pruned")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


@pytest.mark.nightly
def test_two_processes_equal_one(tmp_path):
    """Also where one has many more tokens of a batch than the other: six pairs, which are one batch; and with activations that
    are computed again in the backward pass."""
    rows = ["--data.train_rows", "6", "--data.select_rows", "11", "--data.test_rows", "9", "--curve", "[]"]
    phases = ["--model.finetune", "4", "--model.prune", "4", "--model.retrain", "4", "--model.learning_rate", "3e-3"]
    no_dropout = "{d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 4, decoder_attention_heads: 4,"
    no_dropout += " encoder_ffn_dim: 24, decoder_ffn_dim: 24, dropout: 0.0}"
    same = ["--model.from_scratch", no_dropout, "--model.draw_per", "batch", "--model.budget", "{encoder: 2}"]
    common = [*rows, *phases, *same, "--compare", "posthoc"]
    assert fit(tmp_path, *common, "--data.batch_tokens", "240", run_dir="one") == 0
    halves = ["--data.batch_tokens", "120", "--trainer.devices", "2", "--trainer.strategy", "ddp"]
    again = ["--model.checkpoint_activations", "true", "--run_dir", "two"]
    two = run_fit("--config", write_config(tmp_path), *common, *halves, *again, cwd=tmp_path)
    assert two.returncode == 0, two.stderr[-3000:]
    tables = [pd.read_csv(tmp_path / name / "comparison.csv") for name in ("one", "two")]
    for column in ("heads", "select_loss", "test_loss", "test_bleu", "test_beam_chrf"):
        pd.testing.assert_series_equal(tables[0][column], tables[1][column], rtol=1e-4)
    scores = [pd.read_csv(tmp_path / name / "scores.csv") for name in ("one", "two")]
    for column in ("his", "entropy"):
        pd.testing.assert_series_equal(scores[0][column], scores[1][column], rtol=1e-3)


def test_rivals_keep_the_kinds_that_a_price_leaves_whole(tmp_path):
    """Encoder heads have a price; the others were never to go."""
    price = ["--model.budget", "null", "--model.price", "{encoder: 0.5}", "--model.gate_learning_rate", "2.0"]
    more = ["--compare", "posthoc", "--model.swaps", "12", "--model.minimum_per_layer", "1", "--curve", "[]"]
    assert fit(tmp_path, *price, *more, "--data.select_rows", "8", "--data.test_rows", "8") == 0
    kept = {}
    for file in (tmp_path / "run" / "masks").glob("*.json"):
        kinds = {"encoder": 0, "decoder": 0, "cross": 0}
        for site in json.loads(file.read_text())["sites"]:
            kinds[site["kind"]] += len(site["kept"])
        kept[file.stem] = kinds
    assert {"lambda(noise=configured)+swap", "his", "random"} <= set(kept)
    assert kept["lambda(noise=configured)+swap"]["encoder"] < 8
    assert kept.pop("dense") == {"encoder": 8, "decoder": 4, "cross": 4}
    assert all(kinds == kept["lambda(noise=configured)+swap"] | {"decoder": 4, "cross": 4} for kinds in kept.values())
