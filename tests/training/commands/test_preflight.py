"""Typical mistakes, each told in one sentence before PyTorch is loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gates.errors import GateError
from training.commands import preflight
from training.commands.preflight import check_run, heads_of
from training.commands.table import read

FAQ = Path(__file__).parents[3] / "docs" / "faq.md"
ROWS = "".join(f"the fox sees {word},{label}\n" for word, label in [("basil", "yes"), ("iron", "no")] * 10)
CONFIG = {"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
TOKENIZER = {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a model's files and two files of examples, as a user has them; returns a function that checks a run."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (model / "model.safetensors").write_bytes(b"")
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


def test_files_and_columns(project, tmp_path):
    assert "the train file 'trian.csv' does not exist; check the path" in said(project, "--data.train_file", "trian.csv")
    assert "--data.train_file is given but --data.test_file is not; results need a test file" in said(
        project, without=["--data.test_file"]
    )
    assert "the train split has no column 'review'; it has 'text', 'label'" in said(project, "--data.text_column", "review")
    (tmp_path / "train.csv").write_text("id,review,stars\n1,good,5\n")
    assert "'id', 'review', 'stars', and it is not clear which one is the sentence; give --data.text_c" in said(project)
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a text,{i * 7}\n" for i in range(50)))
    sentence = said(project)
    assert "the label column has 50 different values in 50 training examples" in sentence
    assert "numbers to predict are --data Ratings" in sentence
    (tmp_path / "train.csv").write_text("text,label\n" + ROWS.replace("yes", "1").replace("no", "0"))
    assert "the test split has the label 'no' (example 2), which is not among the classes" in said(project)
    assert "the test_other file 'other.csv' does not exist" in said(project, "--data.more_tests", "{other: other.csv}")
    (tmp_path / "train.csv").write_bytes(b"PK\x03\x04\xff\xfe")
    assert "not UTF-8" in said(project)


def test_numbers_to_predict_and_columns_in_two_roles(project, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"a text,{i % 5 / 2}\n" for i in range(50)))
    assert "the label column has the number '0.5'; expected classes" in said(project)
    assert "one column in two roles ('label', 'label')" in said(
        project, "--data.text_column", "label", "--data.label_column", "label"
    )


def test_a_data_set_of_the_hub_is_not_looked_for():
    check_run(read("fit", ["--model.backbone", "bert-base-uncased", "--data.dataset", "glue", "--data.subset", "sst2"]))


def test_a_run_directory_that_is_taken(project, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").write_text("model: {}\ndata: {}\ntrainer: {}\n")
    assert "'taken' already holds a run" in said(project, "--run_dir", "taken")
    project("--run_dir", "taken", "--existing", "overwrite")


def test_budgets_of_a_comparison(project):
    given = ["--model.backbone", "model", "--data.train_file", "train.csv", "--data.test_file", "test.csv"]
    check_run(read("compare", [*given, "--budgets", "4,2"]))
    with pytest.raises(GateError, match="the budget is 99, but the model has 8 heads"):
        check_run(read("compare", [*given, "--budgets", "99,2"]))


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


def test_a_header_is_not_taken_for_an_example(project, tmp_path):
    for header in ("sentence,label", "review,stars"):
        (tmp_path / "train.csv").write_text(f"{header}\n" + ROWS)
        assert "the first line of 'train.csv' looks like a header" in said(project, "--data.columns", "[sentence,label]")
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(ROWS)
    project("--data.columns", "[sentence,label]")


def test_the_model_and_its_tokenizer(project, tmp_path):
    model = tmp_path / "model"
    assert "the budget is 99, but the model has 8 heads; give fewer, or a fraction" in said(project, "--model.budget", "99")
    assert "the model folder './modle' does not exist; check --model.backbone" in said(project, "--model.backbone", "./modle")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "the tokenizer of 'model' has no padding token" in said(project)
    (model / "tokenizer_config.json").unlink()
    assert "'model' has no tokenizer files (such as tokenizer.json); save the tokenizer there too" in said(project)
    project("--data.tokenizer", "some/name")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    sentence = said(project, "--data.tokenizer", "some/name")
    assert "'model' has its weights as pytorch_model.bin," in sentence
    assert "--model.allow_pickle true" in sentence
    project("--data.tokenizer", "some/name", "--model.allow_pickle", "true")
    (model / "pytorch_model.bin").rename(model / "model.Q4.gguf")
    assert "'model' holds a GGUF file, whose weights are rounded for inference" in said(
        project, "--data.tokenizer", "some/name"
    )
    assert "'model.gguf' is a GGUF file" in said(project, "--model.backbone", "model.gguf")
    (model / "model.Q4.gguf").unlink()
    (model / "config.json").unlink()
    assert "'model' has no readable config.json" in said(project, "--data.tokenizer", "some/name")


def test_a_gpu_that_is_not_there(project, monkeypatch):
    monkeypatch.setattr(preflight, "DEVICES", ())
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "--trainer.accelerator is gpu, but this machine has no GPU for PyTorch" in said(
        project, "--trainer.accelerator", "gpu"
    )
    project("--trainer.accelerator", "cpu")
    monkeypatch.setattr(preflight, "DEVICES", ("/",))
    project("--trainer.accelerator", "gpu")


def test_heads_are_counted_only_where_that_is_sure():
    assert heads_of(CONFIG) == 8
    assert heads_of({"n_layer": 3, "n_head": 5}) == 15
    assert heads_of({**CONFIG, "encoder_layers": 2}) is None
    assert heads_of({**CONFIG, "text_config": {"hidden_size": 4}}) is None
    assert heads_of({"num_hidden_layers": 2}) is None


def test_nothing_heavy_is_loaded_for_it(project):
    code = (
        "import sys\nfrom training.commands.preflight import check_run\nfrom training.commands.table import read\n"
        "given = ['--model.backbone', 'model', '--data.train_file', 'train.csv', '--data.test_file', 'test.csv']\n"
        "check_run(read('fit', given))\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pytorch_lightning', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_sentences_of_the_documentation_are_those_of_the_code():
    """The beginning of each, up to the first value, stands in the code."""
    sources = "".join(path.read_text() for path in (Path(preflight.__file__).parents[1]).rglob("*.py"))
    sentences = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", FAQ.read_text(), flags=re.MULTILINE)
    assert len(sentences) >= 10
    for sentence in sentences:
        words = [part.strip(" ,;()") for part in re.split(r"'[^']*'|\b\d+\b|--[\w.]+|\bgpu\b", sentence)]
        longest = max(words, key=len)
        assert longest[:25] in re.sub(r'"\s*f?"', "", sources).replace("{", "").replace("}", ""), sentence
