"""Typical mistakes, each told in one sentence before PyTorch is loaded."""

import json
import os
import re
from pathlib import Path

import pytest

from gates.errors import GateError
from training.commands.preflight import announcement, check_run
from training.commands.table import read

FAQ = Path(__file__).parents[3] / "docs" / "howto" / "faq.md"
ROWS = "".join(f"the fox sees {word},{label}\n" for word, label in [("basil", "yes"), ("iron", "no")] * 10)
CONFIG = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a model's files and two files of examples, as a user has them; returns a function that checks a run."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.gguf").write_bytes(b"")
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("text,label\n" + ROWS)

    def check(*more, without=()):
        given = {"--model.backbone": "model", "--data.train_file": "train.csv", "--data.test_file": "test.csv"}
        given = {name: value for name, value in given.items() if name not in without}
        check_run(read("fit", [*(part for pair in given.items() for part in pair), *more]))

    return check


def said(check, *arguments, **more):
    """The sentence with which a check refuses."""
    with pytest.raises(GateError) as caught:
        check(*arguments, **more)
    return str(caught.value)


def test_a_run_that_can_be_is_not_refused(project):
    project()
    project("--model.budget", "7", "--data.select_file", "test.csv", "--data.text_column", "text")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--model.budget", "18", "--run_dir", "runs/x"], "pruning a/b to 18 heads, in runs/x"),
        (["--model.budget", "0.5", "--model.unit", "group"], "pruning a/b to 50 % of its groups"),
        (["--model.budget", "{encoder: 3}"], "pruning a/b to encoder 3 heads"),
        (["--model.budget", "auto"], "pruning a/b to the fewest heads that keep its quality"),
        (["--model.budget", "0.7x"], "pruning a/b to heads within a time of 0.7x"),
        (["--model.budget", "null", "--model.price", "0.01"], "pruning a/b to the heads that are worth their price"),
        (["--model.budget", "null", "--model.prune", "0", "--model.retrain", "0"], "training a/b with all heads"),
    ],
)
def test_the_first_line_says_what_was_asked_for(given, sentence):
    line = ["--model.backbone", "a/b", "--data.train_file", "a.csv", "--data.test_file", "b.csv", *given]
    assert announcement(read("fit", line)) == sentence


def test_the_first_line_of_a_comparison():
    given = ["--methods", "his,random", "--budgets", "9,18", "--seeds", "0,1,2", "--run_dir", "c"]
    assert announcement(read("compare", given)) == "comparing on a new model: methods 2, budgets 2, seeds 3, in c"


def test_files_and_folders_that_are_not_there(project):
    assert "the train file 'trian.csv' does not exist; check the path" in said(project, "--data.train_file", "trian.csv")
    assert "--data.train_file is given but --data.test_file is not; results need a test file" in said(
        project, without=["--data.test_file"]
    )
    assert "the test_other file 'other.csv' does not exist" in said(project, "--data.more_tests", "{other: other.csv}")
    assert "the model folder './modle' does not exist; check --model.backbone" in said(project, "--model.backbone", "./modle")
    assert "'model.gguf' is a file; give the folder" in said(project, "--model.backbone", "model.gguf")
    pairs = [f"--data.{split}_{side}=train.csv" for split in ("train", "test") for side in ("source", "target")]
    for given, missing in (
        ([*pairs, "--data.select_source=no.csv", "--data.select_target=x"], "the select file 'no.csv'"),
        (["--data", "Images", "--data.train_folder=cats", "--data.test_folder=x"], "the train folder 'cats'"),
    ):
        with pytest.raises(GateError, match=f"{missing} does not exist"):
            check_run(read("fit", ["--model.backbone", "a/b", *given]))


def test_without_a_network_the_hub_is_left_after_one_attempt(project, monkeypatch, capsys):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    project()
    assert capsys.readouterr().err == ""
    project("--model.backbone", "nobody/nothing")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "'nobody/nothing' is not a folder here, and the Hugging Face Hub does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["relevance", "relevance(rule=gradient-x-input)+swap"])
def test_relevance_of_tags_is_refused_before_anything_is_trained(project, method):
    for name in ("train.tsv", "test.tsv"):
        Path(name).write_text("anna\tB-PER\nsees\tO\n")
    files = ["--data.train_file", "train.tsv", "--data.test_file", "test.tsv"]
    given = ["--model.backbone", "model", "--data", "Tags", *files]
    with pytest.raises(GateError, match=f"{re.escape(method)} follows the one prediction .* take it out of the methods"):
        check_run(read("compare", [*given, "--methods", f"his,{method}"]))
    with pytest.raises(GateError, match=f"{re.escape(method)} follows the one prediction"):
        check_run(read("fit", [*given, "--compare", "full", "--retrained", f"[his,{method}]"]))
    check_run(read("compare", [*given, "--methods", "his,random"]))


def test_the_sentences_of_the_documentation_are_those_of_the_code():
    """The longest part without values of each."""
    root = FAQ.parents[2]
    text = "".join(path.read_text() for folder in ("gates", "training") for path in (root / folder).rglob("*.py"))
    text = re.sub(r'"\s*f?"', "", text).replace("{", "").replace("}", "")
    sentences = re.findall(r"^\| [^|]+ \| [^`|]*`([^`]+)`[^|]* \|", FAQ.read_text(), flags=re.MULTILINE)
    assert len(sentences) >= 10
    for sentence in sentences:
        words = [part.strip(" ,;()") for part in re.split(r"'[^']*'|\b\d+\b|--[\w.]+|\bgpu\b|: No supported", sentence)]
        assert max(words, key=len)[:25] in text, sentence
