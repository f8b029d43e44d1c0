"""A comparison with a known truth, from the command line to the tables."""

import pandas as pd
import pytest
import torch

from training.cli.command_line import CONFIGS
from training.commands.table import run_command
from training.config.data import KnownTruth
from training.truth.tables import as_markdown, judged, smallest_budgets, summary_of_truth, ticks

pytestmark = pytest.mark.usefixtures("undrawn")
CONFIG = str(CONFIGS / "known_truth.yaml")
SMALL = ["--data.train_rows", "64", "--data.select_rows", "32", "--data.test_rows", "64", "--data.score_rows", "64"]
QUIET = ["--wandb.mode", "disabled", "--trainer.enable_progress_bar", "false"]


def rows(method, *, program="p", seed=0, kept=((1, 0, 0.5), (2, 1, 1.0), (4, 1, 1.0))):
    """One row for each (budget, covered functions, accuracy) of a program that needs one head."""
    return [
        {
            "program": program, "seed": seed, "method": method, "budget": budget, "needed": 1, "covered": covered,
            "recall": float(covered), "precision": covered / budget, "exact": covered == budget == 1,
            "test_accuracy": accuracy, "survives": accuracy > 0.99,
        }
        for budget, covered, accuracy in kept
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mask", "recall", "precision", "exact"),
    [
        ([1, 0, 1, 0, 0, 0], 1.0, 1.0, True),
        ([1, 0, 0, 0, 0, 1], 1.0, 1.0, True),
        ([1, 0, 1, 1, 0, 0], 1.0, 2 / 3, False),  # a second copy is kept in vain
        ([1, 1, 0, 0, 0, 0], 0.5, 0.5, False),
        ([0, 0, 1, 1, 0, 0], 0.5, 0.5, False),
        ([0, 0, 0, 0, 0, 0], 0.0, 0.0, False),
    ],
)
def test_interchangeable_heads_count_once(mask, recall, precision, exact):
    found = judged(torch.tensor(mask), [[0], [2, 3, 5]])
    assert (found.recall, found.precision, found.exact) == (recall, precision, exact)


def test_ticks_count_exact_recoveries_where_the_budget_is_what_is_needed():
    found = ((1, 1, 1.0), (2, 1, 1.0))
    truth = pd.DataFrame([*rows("a", kept=found), *rows("a", seed=1), *rows("b"), *rows("b", seed=1), *rows("c", kept=found)])
    assert ticks(truth).loc["p"].to_dict() == {"a": "1/2", "b": "✗", "c": "✓"}


def test_the_smallest_budget_is_the_one_from_which_on_the_function_survives():
    dead, shaky = ((1, 0, 0.5), (2, 0, 0.5)), ((1, 1, 1.0), (2, 1, 0.6), (4, 1, 1.0))
    truth = pd.DataFrame([*rows("a"), *rows("b", kept=dead), *rows("c", kept=shaky)])
    smallest = smallest_budgets(truth).set_index("method")["smallest"]
    assert (smallest["a"], smallest["c"]) == (2, 4)
    assert pd.isna(smallest["b"])
    summary = summary_of_truth(truth).set_index("method")
    assert summary["spare"].dropna().to_dict() == {"a": 1, "c": 3}
    assert summary["lost"].to_dict() == {"a": 0, "b": 1, "c": 0}
    assert [line.count("|") for line in as_markdown(truth).splitlines()] == [5] * 3 + [0] + [8] * 5


@pytest.mark.integration
def test_learned_gates_keep_one_of_the_copies_of_a_needed_head_and_his_does_not(tmp_path):
    """No head alone is missed while its copies are there, so its gradient says nothing."""
    methods = ["--methods", "learned,his", "--seeds", "0", "--data.program", "has-copies", "--data.spare", "[0]"]
    few = SMALL[2:]  # all training examples, which are what gates learn from
    assert run_command("compare", ["--config", CONFIG, "--run_dir", str(tmp_path / "run"), *methods, *few, *QUIET]) == 0
    truth = pd.read_csv(tmp_path / "run" / "truth.csv").set_index("method")
    assert truth[["exact", "survives"]].T.to_dict("list") == {"learned": [True, True], "his": [False, False]}


@pytest.mark.integration
def test_a_benchmark_is_a_comparison_of_each_program_and_a_table_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(KnownTruth, "parts", property(lambda self: two if self.program == "all" else {}))
    two = {name: {"program": name} for name in ("has", "same-ends")}
    methods = ["--methods", "his,random", "--seeds", "0,1", "--data.spare", "[0, 2]"]
    assert run_command("compare", ["--config", CONFIG, "--run_dir", str(tmp_path), *methods, *SMALL, *QUIET]) == 0
    truth = pd.read_csv(tmp_path / "truth.csv")
    assert len(truth) == 2 * 2 * 2 * 2
    assert truth[["program", "budget"]].drop_duplicates().to_numpy().tolist() == [
        ["has", 1], ["has", 3], ["same-ends", 2], ["same-ends", 4]
    ]  # fmt: skip
    his = truth.query("program == 'has' and method == 'his' and budget == 1")
    assert his[["exact", "survives"]].to_numpy().all()
    assert ((truth["recall"] == 1) == truth["survives"]).all()
    assert "| has | ✓ |" in (tmp_path / "truth.md").read_text()
    assert (tmp_path / "has" / "report.html").is_file()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--budgets", "1"], "--data.spare says how many more"),
        (["--data.program", "sorting"], "there is no program 'sorting'; expected all or one of has"),
        (["--data.spare", "[]"], "spare is []"),
        (["--data.program", "has", "--model.from_scratch.hidden_size", "8"], "the program 'has' decides on the model"),
    ],
)
def test_bad_input_is_one_sentence(more, message, tmp_path, capsys):
    assert run_command("compare", ["--config", CONFIG, "--run_dir", str(tmp_path / "run"), *more, *QUIET]) == 2
    assert message in capsys.readouterr().err
