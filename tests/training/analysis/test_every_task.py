"""Experiments of Michel et al. on models without classes, which are judged by their loss."""

import pytest
import torch

from tests.training import causal_runs, translation_runs
from tests.training.analysis.models import make_decoder, make_translator
from training.analysis.heads import across_domains
from training.analysis.model import outcomes

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
