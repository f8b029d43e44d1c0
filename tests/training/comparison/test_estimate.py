"""How long a run will take."""

from dataclasses import replace

import pytest
import torch

from gates.gating.budget import Budget
from tests.training.runs import STEPS_PER_EPOCH, make_data, make_setup
from training.comparison import estimate as module
from training.comparison.cache import ExperimentCache
from training.comparison.estimate import estimate
from training.comparison.experiments import Experiments
from training.comparison.methods import CHEAP_RIVALS, Method, own_method
from training.comparison.plan import PlanEntry, plan_of_comparison, plan_of_run
from training.comparison.run import expected_time


def experiments_of(folder, **options):
    return Experiments(make_setup(**options), make_data(), cache=ExperimentCache(folder))


@pytest.fixture
def seconds(monkeypatch):
    """A function that returns the estimate in seconds, by a stand-in in which every forward pass takes a second."""
    monkeypatch.setattr(module, "_forward", lambda subject, batch, half: 1.0)
    monkeypatch.setattr(module, "duration", str)

    def seconds(experiments, plan, **more):
        said = estimate(experiments, plan, **more)
        searches = any("swap" in entry.method.modifiers for entry in plan)
        assert said.endswith(", without searches") == searches
        return float(said.split()[1])

    return seconds


def test_a_comparison_takes_as_long_as_what_its_methods_do(seconds, tmp_path):
    """What methods share counts once."""
    experiments, budgets = experiments_of(tmp_path, finetune=2.0, prune=1.0, retrain=1.0), [Budget(4, {}), Budget(2, {})]

    def expected(*methods, budgets=budgets[:1], stages=("post hoc",), **more):
        plan = list(plan_of_comparison([Method.parse(name) for name in methods], budgets, stages))
        return seconds(experiments, plan, **more)

    alone, passes = expected("random"), module.ROW + 2  # of both splits, of a batch each
    assert expected("random", seeds=3) == 3 * alone
    assert expected("random", points=5) == alone + 5
    assert expected("random", refits=2) == alone + 2 * (expected("random+refit") - alone)
    assert expected("learned") == expected("learned+swap") == alone + 3 * STEPS_PER_EPOCH
    assert expected("learned", "learned+swap") == expected("learned") + passes
    assert expected("random", stages=("post hoc", "retrained")) == alone + 2 * (passes + 2 * 3 * STEPS_PER_EPOCH)  # also dense
    assert expected("his") > alone
    assert expected("his") - alone == pytest.approx(3 * (expected("entropy") - alone))  # of a forward pass alone
    assert expected("entropy", "entropy(keep=high)", "hies", "his") == pytest.approx(
        expected("entropy") + expected("his") - alone + 3 * passes
    )
    assert expected("his", budgets=budgets) == expected("his") + passes
    assert expected("his+refit") - expected("his") == expected("random+refit") - alone > 0
    assert seconds(experiments, [], exports=True) == seconds(experiments, []) + module.EXPORT
    frozen = experiments_of(tmp_path, finetune=2.0, prune=1.0, retrain=0.0)
    plan = list(plan_of_comparison([Method("random")], budgets[:1], ["post hoc", "retrained"]))
    assert seconds(frozen, plan) == alone + 2 * passes  # nothing trains on
    together = experiments_of(tmp_path, finetune=2.0, prune=1.0, retrain=0.0, pipelined=False)
    assert seconds(together, plan) == alone + 2 * (passes + 3 * STEPS_PER_EPOCH)  # as gates and weights train together
    plan = list(plan_of_comparison([Method("random")], budgets[:1], ["post hoc"]))
    longer = experiments_of(tmp_path, finetune=3.0, prune=1.0, retrain=1.0)
    assert seconds(longer, plan) == alone + 3 * STEPS_PER_EPOCH


def test_a_run_counts_the_choices_that_it_tries(seconds, tmp_path):
    def whole_run(keep):
        setup = make_setup(refit=True, keep=keep)
        setup = replace(setup, end=replace(setup.end, compare="none", retrained=[]))
        experiments = Experiments(setup, make_data(), cache=ExperimentCache(tmp_path / keep))
        return float(expected_time(experiments, Method.parse("learned+refit")).split()[1]), experiments

    (best, experiments), (learned, _) = whole_run("best"), whole_run("learned")
    alone = seconds(experiments, [])
    rivals = [seconds(experiments, [PlanEntry(Method.parse(name), None, ("post hoc",))]) - alone for name in CHEAP_RIVALS]
    assert best - learned == pytest.approx(sum(rivals))  # the training with the heads is equally long


@pytest.mark.parametrize(
    ("precision", "seconds", "is_named"), [("32-true", 0.5, True), ("32-true", 0.9, False), ("bf16-mixed", 0.5, False)]
)
def test_a_precision_in_which_this_machine_is_much_faster_is_named(tmp_path, monkeypatch, precision, seconds, is_named):
    monkeypatch.setattr(module, "_forward", lambda subject, batch, half: seconds if half else 1.0)
    setup = make_setup()
    setup = replace(setup, trainer=replace(setup.trainer, precision=precision))
    experiments = Experiments(setup, make_data(), cache=ExperimentCache(tmp_path))
    assert ("--trainer.precision bf16-mixed is faster here" in estimate(experiments, [])) == is_named


def test_a_run_that_continues_says_no_time(tmp_path):
    """The finished parts would be counted again."""
    experiments = experiments_of(tmp_path / "experiments")
    plan = list(plan_of_run(own_method(experiments.setup.model), None, experiments.setup.end))
    assert "on this machine" in estimate(experiments, plan)
    experiments.dense()
    assert estimate(experiments, plan) == ""


def test_the_estimate_changes_neither_weights_nor_noise(tmp_path):
    experiments = experiments_of(tmp_path)
    before = {name: tensor.clone() for name, tensor in experiments.pruner.state_dict().items()}
    noise = torch.get_rng_state()
    plan = list(plan_of_run(own_method(experiments.setup.model), None, experiments.setup.end))
    assert "on this machine" in estimate(experiments, plan)
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(torch.equal(tensor, before[name]) for name, tensor in experiments.pruner.state_dict().items())
    assert experiments.pruner.training
