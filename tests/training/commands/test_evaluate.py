"""Language models on tasks of lm-evaluation-harness: what it says is what the models compute, in every form."""

import importlib.util
import json
import math

import pandas as pd
import pytest
import torch
import transformers

from gates.errors import GateError
from gates.export.checkpoint import load_pruned
from tests.training.causal_runs import write_config
from training.commands import evaluate_line
from training.commands.evaluate import of_run
from training.commands.evaluate_line import task_names
from training.commands.table import run_command
from training.data.synthetic_documents import generate_documents
from training.fit import main as fit

needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness, an extra, is not installed"
)
STORIES = [" ".join(story.split()[:12]) for story in generate_documents(10, seed=77)]
CHOICE = """
task: next_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: label
doc_to_choice: choices
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    more = ["--model.unit", "head", "--model.budget", "3"]
    assert fit(["--config", write_config(folder), "--run_dir", str(folder / "run"), *more]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks in local files, separated by a comma."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": text, "choices": ["the", "so"], "label": row % 2} for row, text in enumerate(STORIES)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choice.yaml", CHOICE), ("rolling.yaml", ROLLING)):
        (folder / name).write_text(text.format(data=folder / "data.jsonl"))
    return f"{folder / 'choice.yaml'},{folder / 'rolling.yaml'}"


@pytest.fixture(scope="module")
def table(run, tasks):
    assert run_command("evaluate", [str(run), "--tasks", tasks, "--forms", "[dense,gated,pruned]"]) == 0
    return pd.read_csv(run / "evaluation" / "results.csv").set_index(["form", "task"])


def surprise(model, tokenizer, text, given=()):
    """The negative log likelihood of a text in nats, token by token, behind the start token or what is given."""
    start = list(given) or [tokenizer.eos_token_id]
    own = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[*start, *own]])).logits[0].log_softmax(-1)
    return -sum(float(logits[len(start) - 1 + place, token]) for place, token in enumerate(own))


@needs_harness
@pytest.mark.parametrize("form", ["dense", "gated", "pruned"])
def test_perplexity_is_that_of_the_model_in_memory(run, table, form):
    with of_run(str(run), form) as system:
        total = sum(surprise(system.model, system.tokenizer, text) for text in STORIES)
        assert system.heads == (8 if form == "dense" else 3)
    expected = math.exp(total / sum(len(text.split()) for text in STORIES))
    row = table.loc[(form, "stories")]
    assert row["value"] == pytest.approx(expected, rel=1e-4)
    assert (row["metric"], row["heads"], row["examples"]) == ("word_perplexity", system.heads, 10)
    assert not row["higher_is_better"]


@needs_harness
def test_choices_are_those_of_the_model_in_memory(run, table):
    with of_run(str(run), "dense") as system:
        right = 0
        for row, text in enumerate(STORIES):
            given = system.tokenizer(text, add_special_tokens=False)["input_ids"]
            said = [surprise(system.model, system.tokenizer, choice, given) for choice in ("the", "so")]
            right += said.index(min(said)) == row % 2
    row = table.loc[("dense", "next_words")]
    assert row["value"] == pytest.approx(right / 10)
    assert row["error"] == pytest.approx(math.sqrt(right / 10 * (1 - right / 10) / 9), rel=1e-6)


@needs_harness
def test_a_mask_in_force_and_removed_heads_are_the_same_model(table):
    values = table["value"].unstack("form")
    assert values["gated"].tolist() == pytest.approx(values["pruned"].tolist(), rel=1e-5)
    assert values.loc["stories", "dense"] != pytest.approx(values.loc["stories", "pruned"], rel=1e-3)


@needs_harness
def test_results_say_how_they_came_about(run, table):
    said = json.loads((run / "evaluation" / "results.json").read_text())
    assert set(said["forms"]) == {"dense", "gated", "pruned"}
    assert said["versions"]["lm_eval"]
    assert "evaluate" in said["command"]
    assert said["forms"]["dense"]["n-shot"] == {"next_words": 0, "stories": 0}


@needs_harness
def test_an_export_is_evaluated_and_its_folder_left_as_it_is(run, table, tasks, tmp_path, capsys):
    files = sorted(path.name for path in (run / "export").iterdir())
    out = tmp_path / "out"
    assert run_command("evaluate", [str(run / "export"), "--tasks", tasks, "--output", str(out)]) == 0
    found = pd.read_csv(out / "results.csv").set_index("task")
    assert found.loc["stories", "value"] == pytest.approx(table.loc[("pruned", "stories"), "value"], rel=1e-5)
    assert found.loc["stories", "form"] == "export"
    assert sorted(path.name for path in (run / "export").iterdir()) == files
    assert "word_perplexity" in capsys.readouterr().out


@needs_harness
def test_a_limit_and_solved_examples(run, tasks, tmp_path):
    choice = tasks.split(",")[0]
    given = [str(run), "--tasks", choice, "--forms", "[pruned]", "--limit", "4", "--output", str(tmp_path / "out")]
    assert run_command("evaluate", given) == 0
    (row,) = pd.read_csv(tmp_path / "out" / "results.csv").to_dict("records")
    assert (row["examples"], row["shots"]) == (4, 0)


@needs_harness
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tasks", "no_such_task"], "'no_such_task', which lm-evaluation-harness does not know"),
        (["--tasks", "none.yaml"], "'none.yaml', and there is no such file"),
        (["--tasks", "a,,b"], "expected names or files, separated by commas"),
        (["--tasks", "a", "--limit", "1.5"], "--limit is 1.5; expected a number of examples"),
        (["--tasks", "a", "--fewshot", "-1"], "--fewshot is -1; expected 0 or more"),
        (["--tasks", "a", "--batch_size", "0"], "--batch_size is 0"),
        (["--tasks", "a", "--forms", "[]"], "expected some of dense, gated, pruned, each once"),
    ],
)
def test_lines_that_cannot_be_are_refused(run, more, said, capsys):
    assert run_command("evaluate", [str(run), *more]) == 2
    assert said in capsys.readouterr().err


@needs_harness
def test_models_that_cannot_be_evaluated_are_refused(tmp_path, tasks, capsys):
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    assert run_command("evaluate", [str(tmp_path / "bert"), "--tasks", tasks, "--forms", "[dense]"]) == 2
    assert "--forms is given, but a model that is no run does not use it" in capsys.readouterr().err
    for folder, said in (("bert", "tokenizer"), ("none", "neither a folder with a config.json")):
        assert run_command("evaluate", [str(tmp_path / folder), "--tasks", tasks]) == 2
        assert said in capsys.readouterr().err


@needs_harness
def test_a_task_whose_file_is_broken_is_told_in_one_sentence(run, tmp_path, capsys):
    (tmp_path / "broken.yaml").write_text("task: broken\ndataset_path: json\noutput_type: no_such\n")
    assert run_command("evaluate", [str(run), "--tasks", str(tmp_path / "broken.yaml"), "--forms", "[pruned]"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "broken.yaml" in error


def test_without_the_harness_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(evaluate_line.importlib.util, "find_spec", lambda name: None)
    assert run_command("evaluate", ["runs/none", "--tasks", "arc_easy"]) == 2
    assert "run pip install 'lm_eval[hf]'" in capsys.readouterr().err


def test_names_are_taken_once_in_their_order():
    assert task_names("b, a,b") == ["b", "a"]
    with pytest.raises(GateError, match="expected names or files"):
        task_names("")


@needs_harness
def test_the_pruned_form_is_the_export(run):
    ids = torch.arange(3, 12)[None]
    with of_run(str(run), "pruned") as system, torch.no_grad():
        torch.testing.assert_close(system.model(ids).logits, load_pruned(run / "export").eval()(ids).logits)
