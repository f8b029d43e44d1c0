"""The fewest heads whose model keeps the dense model's quality."""

import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from gates.errors import GateError
from tests.training.runs import make_data, make_setup, run_fit, write_config
from training.analysis.model import setup_of
from training.comparison import quality
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import Experiments
from training.comparison.methods import Method
from training.comparison.quality import QualityPoint, fewest_heads
from training.report.captions import outcome
from training.runs.directory import RunDirectory
from training.tasks.causal_lm import CausalLM
from training.tasks.classification import Regression
from training.tasks.translation import Translation


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    setup = make_setup(finetune=1.0, learning_rate=1e-2)
    return Experiments(setup, make_data(), cache=ExperimentCache(tmp_path_factory.mktemp("experiments")))


@pytest.mark.parametrize("fewest", range(1, 8))
def test_bisection_finds_the_fewest_heads_whose_interval_is_within_the_loss(monkeypatch, experiments, fewest):
    def quality_at(experiments, selector, method, heads):
        loss = 0.5 if heads >= fewest else 2.0
        return QualityPoint(heads, 0.0, loss, loss - 0.1, loss + 0.4)

    monkeypatch.setattr(quality, "quality_at", quality_at)
    heads, points = fewest_heads(experiments, Method("obs"), 1.0)
    assert heads == fewest
    assert [point.heads for point in points] == sorted({point.heads for point in points})
    assert len(points) <= 3
    with pytest.raises(GateError, match=r"max_loss is 0.8, but obs with 7 of 8 heads may lose up to 0\.90"):
        fewest_heads(experiments, Method("obs"), 0.8)


def test_a_loss_is_that_of_the_selection_split_in_points(experiments):
    """Of the mask alone, against metrics that the evaluation computed itself."""
    heads, points = fewest_heads(experiments, Method("obs"), 100.0)
    assert heads == 1
    dense = experiments.post_hoc(torch.ones(8)).result["select_accuracy"]
    for point in points:
        assert point.loss == pytest.approx(100 * (dense - point.value))
        assert point.low <= point.loss <= point.high


def test_a_loss_is_in_points_unless_lower_is_better():
    """Also of a metric without a unit, such as BLEU."""
    tasks = (Regression, Translation, CausalLM)
    assert [quality.measure_of(task) for task in tasks] == ["points", "points", "percent"]  # which a class states
    search = {"budget": 3, "method": "obs+refit", "max_loss": 1.0, "measure": "points"}
    search["points"] = [{"heads": 3, "loss": 0.5, "low": 0.1, "high": 0.9}]
    assert "loses at most 1 points of bleu" in outcome({"budget_search": search}, "bleu")["budget"]


def test_a_minimum_of_all_heads_leaves_no_budget_to_find(experiments):
    setup = replace(experiments.setup, model=replace(experiments.setup.model, minimum_per_layer=4, budget=8))
    other = Experiments(setup, experiments.data, cache=experiments.cache)
    with pytest.raises(GateError, match="minimum_per_layer is 4, which keeps all 8 heads, so there is no budget to find"):
        fewest_heads(other, Method("obs"), 1.0)


def test_a_layer_with_fewer_heads_than_the_minimum_needs_no_more_than_it_has(monkeypatch, experiments):
    setup = replace(experiments.setup, model=replace(experiments.setup.model, minimum_per_layer=4, budget=8))
    other = Experiments(setup, experiments.data, cache=experiments.cache)
    monkeypatch.setattr(other.pruner.gates, "layer_index", lambda: torch.tensor([0] * 6 + [1] * 2))
    monkeypatch.setattr(quality, "quality_at", lambda *given: QualityPoint(given[-1], 0.0, 0.0, 0.0, 0.0))
    assert fewest_heads(other, Method("obs"), 1.0)[0] == 4 + 2


@pytest.mark.integration
def test_a_run_keeps_as_many_heads_as_its_loss_needs(tmp_path):
    """Also if each layer needs more than the placeholder until the search."""
    options = ["--run_dir", "run", "--model.budget", "auto", "--model.max_loss", "99", "--model.refit", "true"]
    done = run_fit("--config", write_config(tmp_path), *options, "--model.minimum_per_layer", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 is the smallest budget tried whose obs+refit loses at most 99 points of accuracy" in done.stdout
    search = json.loads((tmp_path / "run" / "budget.json").read_text())
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())["run"]
    assert (found["kept"], search["budget"], search["method"]) == (4, 4, "obs+refit")
    assert (tmp_path / "run" / "plots" / "budget.png").is_file()
    assert set(pd.read_csv(tmp_path / "run" / "metrics.csv")["train/phase"].dropna()) == {0, 1, 2}  # all phases are logged
    assert setup_of(RunDirectory.finished(tmp_path / "run")).model.budget == 4
