"""A run's own training as experiments."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from tests.training.runs import make_data, make_setup
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments, learned_result
from training.comparison.methods import Method
from training.comparison.run import adopt, is_adopted, restore, train
from training.comparison.selection import MaskSelector
from training.config import SwapSearch
from training.runs.directory import RunDirectory
from training.scoring.mask_search import swapped
from training.setup import make_pruner


def trained_run(folder, **options):
    """Everything that adoption needs of a run, trained."""
    setup, data = make_setup(**({"finetune": 0.5, "prune": 0.5, "retrain": 0.5} | options)), make_data()
    data.order_by(setup.run.seed)
    pruner, run = make_pruner(setup, data), RunDirectory(folder)
    run.create("")
    experiments = Experiments(setup, data, cache=ExperimentCache(folder / "experiments"), pruner=pruner)
    return experiments, pruner, train(setup, run, pruner, data, [], None, identity="own"), run


def kinds(experiments):
    """The names of what is kept, with what each depends on and its result."""
    found = {}
    for file in experiments.cache.path.glob("[!.]*/experiment.json"):
        determined_by = json.loads(file.read_text())
        found[determined_by["experiment"]] = determined_by, json.loads(file.with_name("result.json").read_text()), file.parent
    return found


def test_each_phase_is_an_experiment_with_its_cost(tmp_path):
    experiments, pruner, run, _ = trained_run(tmp_path)
    assert not is_adopted(experiments, pruner)
    adopt(experiments, pruner, run)
    assert is_adopted(experiments, pruner)
    found = kinds(experiments)
    assert found.keys() == {"dense", "learn", "retrain"}
    assert [found[name][1]["steps"] for name in ("dense", "learn", "retrain")] == [8, 8, 8]
    assert all(one[1]["seconds"] > 0 for one in found.values())
    assert found["learn"][1]["log_alpha"] == pruner.gates.log_alpha.tolist()
    assert found["learn"][1]["mask"] == found["retrain"][0]["values"] == pruner.gates.mask.tolist()
    assert found["retrain"][1]["test_loss"] == run.metrics["test_loss"]
    kept = np.load(found["retrain"][2] / "predictions.npz")
    accuracy = (kept["test_prediction"] == kept["test_target"]).mean()
    assert accuracy == pytest.approx(run.metrics["test_accuracy"], abs=1e-6)
    weights = torch.load(found["dense"][2] / "weights.ckpt", weights_only=True)
    assert weights["global_step"] == 8
    assert pd.read_csv(found["learn"][2] / "gates_over_time.csv")["step"].between(9, 16).all()


def test_a_search_by_swaps_is_one_too_and_costs_nothing_twice(tmp_path):
    experiments, pruner, run, _ = trained_run(tmp_path, swaps=12.0, learning_rate=1e-2, init_spread=0.0)
    adopt(experiments, pruner, run)
    found = kinds(experiments)
    assert found.keys() == {"dense", "learn", "swap", "retrain"}
    assert found["swap"][0]["mask"] == found["learn"][1]["mask"]
    assert found["swap"][1]["mask"] == found["retrain"][0]["values"] == pruner.gates.mask.tolist()
    assert found["swap"][1]["seconds"] == pytest.approx(pruner.search["seconds"], abs=0.02)
    together = run.costs["retrain"].seconds  # the search is done when that phase begins
    apart = found["swap"][1]["seconds"] + found["retrain"][1]["seconds"]
    assert apart == pytest.approx(max(together, pruner.search["seconds"]), abs=0.05)


def test_a_refit_is_one_too_and_costs_nothing_twice(tmp_path):
    experiments, pruner, run, directory = trained_run(tmp_path, refit=True, learning_rate=1e-2)
    adopt(experiments, pruner, run)
    assert is_adopted(experiments, pruner)
    found = kinds(experiments)
    assert found.keys() == {"dense", "learn", "refit", "retrain"}
    assert found["refit"][0]["mask"] == found["learn"][1]["mask"] == pruner.gates.mask.tolist()
    assert found["retrain"][0]["start"] == found["refit"][2].name
    assert found["refit"][1]["tried"] == pruner.refitted["tried"]
    assert found["refit"][1]["seconds"] == pruner.refitted["seconds"] > 0
    assert found["refit"][1]["forward_examples"] == pruner.refitted["forward_examples"] > 0
    phase = run.costs["retrain"]
    for name, whole in (("forward_examples", phase.forward_examples), ("backward_examples", phase.backward_examples)):
        assert found["refit"][1][name] + found["retrain"][1][name] == pytest.approx(whole, abs=1)
    apart = found["refit"][1]["seconds"] + found["retrain"][1]["seconds"]
    assert apart == pytest.approx(max(run.costs["retrain"].seconds, found["refit"][1]["seconds"]), abs=0.05)
    again = make_pruner(experiments.setup, experiments.data)
    assert restore(directory, again)
    assert is_adopted(experiments, again)
    assert again.refitted == pruner.refitted


def test_swaps_before_a_refit_leave_the_refits_of_both_masks(tmp_path, monkeypatch):
    """Each is paid for once, and a comparison finds what the run has chosen between."""

    def turned(subject, mask, budget, options):
        return swapped(subject, mask, budget, options) | {"mask": mask.roll(1).tolist()}  # whatever the search has found

    monkeypatch.setattr("training.pruner.module.swapped", turned)
    experiments, pruner, run, _ = trained_run(tmp_path, refit=True, swaps=8.0, learning_rate=1e-2)
    (other,) = pruner.refitted["others"]
    assert [other["mask"], pruner.gates.mask.tolist()] in (
        [learned_result(pruner)["mask"], pruner.search["mask"]],
        [pruner.search["mask"], learned_result(pruner)["mask"]],
    )
    adopt(experiments, pruner, run)
    assert is_adopted(experiments, pruner)
    budget, before = pruner.steering.budget_of(pruner.gates.mask.cpu()), len(list(experiments.cache.path.iterdir()))
    selector = MaskSelector(experiments, [budget.total], swaps=SwapSearch(passes=8.0), as_configured="learned")
    found = selector.select(Method.parse("learned+swap+refit"), budget)
    assert len(list(experiments.cache.path.iterdir())) == before
    assert found.mask.tolist() == pruner.gates.mask.tolist()
    spent = pruner.search["seconds"] + pruner.refitted["seconds"] + other["seconds"]
    assert found.cost.seconds == pytest.approx(run.costs["prune"].seconds + spent, abs=0.05)


def test_what_is_lost_is_known_to_be_and_the_rest_stays(tmp_path):
    """After a kill in the middle of adopting, the run's end is restored and the rest adopted."""
    experiments, pruner, run, directory = trained_run(tmp_path)
    adopt(experiments, pruner, run)
    lost = next(folder for name, (_, _, folder) in kinds(experiments).items() if name == "retrain")
    lost.rename(tmp_path / "lost")
    assert not is_adopted(experiments, pruner)
    before = {folder.name: (folder / "result.json").stat().st_mtime_ns for _, _, folder in kinds(experiments).values()}
    again = make_pruner(experiments.setup, experiments.data)
    assert restore(directory, again)
    assert not is_adopted(experiments, again)
    adopt(experiments, again, run)
    assert is_adopted(experiments, again)
    after = {folder.name: (folder / "result.json").stat().st_mtime_ns for _, _, folder in kinds(experiments).values()}
    assert after.items() > before.items()
    assert lost.name in after


def test_a_dense_model_alone_is_itself_and_its_evaluation(tmp_path):
    experiments, pruner, run, _ = trained_run(tmp_path, finetune=1.0, prune=0.0, retrain=0.0, budget=None)
    adopt(experiments, pruner, run)
    found = kinds(experiments)
    assert found.keys() == {"dense", "post hoc"}
    assert found["post hoc"][0]["values"] == [1.0] * 8
    assert (found["dense"][1]["steps"], found["post hoc"][1]["steps"]) == (16, 0)
    assert experiments.post_hoc(torch.ones(8)).result["test_loss"] == run.metrics["test_loss"]
