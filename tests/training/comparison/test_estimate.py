"""How long a run will take."""

from dataclasses import replace

import pytest
import torch

from gates.gating.budget import Budget
from tests.training.runs import STEPS_PER_EPOCH, make_data, make_setup
from training.comparison import estimate as module
from training.comparison.cache import ExperimentCache
from training.comparison.estimate import estimate, estimate_of_seeds, pieces_of, seconds_of_run
from training.comparison.experiments import Experiments
from training.comparison.methods import Method, own_method
from training.comparison.plan import plan_of_comparison, plan_of_run


def experiments_of(folder, compare="posthoc", **options):
    setup = make_setup(**options)
    setup = replace(setup, end=replace(setup.end, compare=compare, curve=[]))
    return Experiments(setup, make_data(), cache=ExperimentCache(folder))


def seconds(experiments):
    plan = list(plan_of_run(own_method(experiments.setup.model), None, experiments.setup.end))
    return seconds_of_run(pieces_of(experiments), experiments, plan)


def test_training_takes_as_long_as_its_steps_and_a_comparison_as_its_rows(monkeypatch, tmp_path):
    """By a stand-in in which every forward pass takes a second; an evaluation of both splits takes two."""
    monkeypatch.setattr(module, "_forward", lambda subject, batch: 1.0)
    short = seconds(experiments_of(tmp_path / "short", finetune=1.0, refit=False))
    long = seconds(experiments_of(tmp_path / "long", finetune=3.0, refit=False))
    validations = 2  # of a batch each
    assert long[0] - short[0] == pytest.approx(2 * STEPS_PER_EPOCH * 3 + validations)
    assert long[1] == short[1]
    refitted = seconds(experiments_of(tmp_path / "refitted", finetune=1.0, refit=True))
    assert refitted[0] > short[0]
    assert refitted[1] > short[1]
    alone = seconds(experiments_of(tmp_path / "alone", "none", finetune=1.0, refit=False))
    assert alone[0] == short[0]
    assert alone[1] < short[1]


def test_a_comparison_takes_as_long_as_what_its_methods_do(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_forward", lambda subject, batch: 1.0)
    monkeypatch.setattr(module, "duration", lambda seconds: f"{seconds:g}")
    experiments, budget = experiments_of(tmp_path, finetune=2.0, prune=1.0, retrain=1.0), Budget(4, {})

    def expected(*methods, seeds=1, stages=("post hoc",)):
        plan = list(plan_of_comparison([Method.parse(name) for name in methods], [budget], stages))
        said = estimate_of_seeds(experiments, plan, seeds)
        assert said.endswith(", without searches; what is stored already takes no time") == ("learned+swap" in methods)
        return float(said.split()[1])

    alone, passes = expected("random"), module.ROW + 2  # of both splits, of a batch each
    assert expected("random", seeds=3) == 3 * alone
    assert expected("learned") == expected("learned+swap") == alone + 3 * STEPS_PER_EPOCH
    assert expected("random", stages=("post hoc", "retrained")) == alone + 2 * (passes + 3 * STEPS_PER_EPOCH)  # also dense
    assert expected("his") > alone
    assert expected("his+refit") - expected("his") == expected("random+refit") - alone > 0


def test_the_estimate_changes_neither_weights_nor_noise(tmp_path):
    experiments = experiments_of(tmp_path)
    before = {name: tensor.clone() for name, tensor in experiments.pruner.state_dict().items()}
    noise = torch.get_rng_state()
    plan = list(plan_of_run(own_method(experiments.setup.model), None, experiments.setup.end))
    assert estimate(experiments, plan).endswith("of comparison on this machine")
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(torch.equal(tensor, before[name]) for name, tensor in experiments.pruner.state_dict().items())
    assert experiments.pruner.training
