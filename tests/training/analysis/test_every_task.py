"""Experiments of Michel et al. on models without classes, which are judged by their loss."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from gates.errors import GateError
from tests.training import causal_runs, translation_runs
from tests.training.analysis.models import make_decoder, make_dense, make_translator
from training.analysis.heads import across_domains
from training.analysis.model import head_importance, load_run, outcomes
from training.commands.table import run_command

TASKS = {"language model": (causal_runs, make_decoder), "translator": (translation_runs, make_translator)}


@pytest.mark.parametrize("task", ["language model", pytest.param("translator", marks=pytest.mark.integration)])
def test_heads_on_other_data_of_the_same_task(task):
    task_runs, make = TASKS[task]
    dense = make()
    whole = outcomes(dense, torch.ones(1, dense.gates.size), "test").losses.mean()
    same = across_domains(dense, task_runs.make_data())
    assert same.numbers["dense"] == same.numbers["dense_other"] == pytest.approx(whole)
    for name in ("his", "loss_change"):
        assert same.numbers[name]["pearson"] == pytest.approx(1)
        assert same.tables["domains"][name].nunique() > 3  # or the correlation would show nothing
    assert same.sentences[0] == f"Test loss is {whole:.3f} on the run's data and {whole:.3f} on the other data."
    other = task_runs.make_data(test_rows=9)
    other.tokenizer = dense.data.tokenizer
    found = across_domains(dense, other)
    assert found.numbers["dense_other"] == pytest.approx(
        outcomes(dense, torch.ones(1, dense.gates.size), "test", data=other).losses.mean()
    )
    assert found.numbers["loss_change"]["pearson"] < 0.9999


def test_other_data_of_another_task_are_refused():
    with pytest.raises(GateError, match=r"of the task .* Classification"):
        across_domains(make_dense(), causal_runs.make_data())


@pytest.mark.integration
def test_a_language_model_on_other_data_and_through_its_training(causal_run, tmp_path, capsys):
    run, out = causal_run, tmp_path / "out"
    arguments = ["--experiments", "through-training,domains", "--other_data.test_rows", "9", "--run_dir", str(out)]
    assert run_command("analyze", [str(run), *arguments]) == 0
    dense = load_run(str(run))
    table = pd.read_csv(out / "through_training.csv")
    whole = outcomes(dense, torch.ones(1, dense.gates.size), "test").losses.mean()
    last = table[table["epoch"].eq(1.5)]
    assert last.loc[last["pruned"].eq(0), "metric"].item() == pytest.approx(whole)
    np.testing.assert_allclose(table["metric"], table["loss"])
    scores = pd.read_csv(out / "through_training_scores.csv")
    np.testing.assert_allclose(scores["his"][dense.gates.size :], head_importance(dense), rtol=1e-4)
    found = json.loads((out / "metrics.json").read_text())["experiments"]
    assert found["through-training"]["numbers"]["same_weights"]
    assert found["domains"]["numbers"]["dense"] == pytest.approx(whole)
    assert found["domains"]["numbers"]["dense_other"] != pytest.approx(whole)  # fewer stories
    assert f"(with all {whole:.3f}) after epoch 1.5" in capsys.readouterr().out
