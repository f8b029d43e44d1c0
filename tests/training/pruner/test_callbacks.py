"""Callbacks of training: costs, ends of phases, and predictions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gates.errors import GateError
from tests.training.pruner.fits import Each, N, Save, fit, make_data
from tests.training.runs import make_pruner, make_trainer
from training.pruner.callbacks import CostInCheckpoints, EndOfPhase, PhaseCosts, Predictions
from training.pruner.module import evaluate
from training.runs.cost import Cost


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on by a second with every batch, before other callbacks see it."""
    clock = SimpleNamespace(now=0.0)
    clock.ticks = Each(lambda *_: setattr(clock, "now", clock.now + 1))
    monkeypatch.setattr("training.runs.cost.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def seconds(costs):
    return {phase: cost.seconds for phase, cost in costs.costs.items()}


@pytest.mark.parametrize(
    ("settings", "expected", "accumulated"),
    [
        ({}, {"finetune": N, "prune": N, "retrain": N}, 1),
        ({}, {"finetune": N, "prune": N, "retrain": N}, 2),
        ({"finetune": 0.0, "retrain": 2.0}, {"prune": N, "retrain": 2 * N}, 1),
    ],
)
def test_every_phase_is_charged_its_own_time(settings, expected, accumulated, clock):
    costs = PhaseCosts()
    fit(make_pruner(**settings), clock.ticks, costs, accumulate_grad_batches=accumulated)
    assert seconds(costs) == expected
    clock.now += 100.0
    assert seconds(costs) == expected  # the clock of a run that has ended stands
    assert costs.state_dict().keys() == expected.keys()


def test_every_phase_counts_the_examples_it_trains_on_and_none_of_validation():
    costs, data = PhaseCosts(), make_data()
    make_trainer(callbacks=[costs], limit_val_batches=1.0).fit(make_pruner(), data)
    examples = len(data.splits["train"])
    counted = {phase: (cost.forward_examples, cost.backward_examples) for phase, cost in costs.costs.items()}
    assert counted == {phase: (pytest.approx(examples), pytest.approx(examples)) for phase in ("finetune", "prune", "retrain")}


@pytest.mark.parametrize("at", [5, N, N + 3, 2 * N + 3])
def test_a_run_that_is_resumed_counts_whole(at, clock, tmp_path):
    fit(None, clock.ticks, PhaseCosts(), Save(tmp_path, at), max_steps=at + 2)
    clock.now += 1000.0  # between both
    costs = PhaseCosts()
    fit(None, clock.ticks, costs, ckpt_path=tmp_path / f"{at}.ckpt")
    assert seconds(costs) == {"finetune": N, "prune": N, "retrain": N}


def test_work_of_several_steps_keeps_its_cost_in_checkpoints(tmp_path):
    cost = Cost(12.5, 300.0)
    fit(None, CostInCheckpoints(lambda: cost), Save(tmp_path, 1), max_steps=1)
    path = tmp_path / "1.ckpt"
    torch.save(torch.load(path, weights_only=True) | {"identity": "own"}, path)
    assert CostInCheckpoints.read(path, "own") == cost
    with pytest.raises(GateError, match="is not of the experiment"):
        CostInCheckpoints.read(path, "another")


@pytest.mark.parametrize(("phase", "end", "mode"), [("finetune", N, "open"), ("prune", 2 * N, "masked")])
def test_training_ends_with_a_phase_and_a_checkpoint_of_it(phase, end, mode, tmp_path):
    pruner = fit(None, EndOfPhase(tmp_path / "end.ckpt", phase))
    assert pruner.trainer.global_step == end
    assert pruner.gates.mode == mode
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["global_step"] == end


def test_predictions_are_what_the_metrics_count():
    pruner, kept = make_pruner(), Predictions()
    data = make_data(eval_batch_size=40, test_rows=90)
    metrics = evaluate(make_trainer(callbacks=[kept], limit_val_batches=1.0), pruner, data)
    found = kept.arrays()
    assert {name: len(values) for name, values in found.items()} == {
        "select_prediction": 96, "select_target": 96, "test_prediction": 90, "test_target": 90,
    }  # fmt: skip
    for split in ("select", "test"):
        right = found[f"{split}_prediction"] == found[f"{split}_target"]
        assert right.mean() == pytest.approx(metrics[f"{split}_accuracy"])
    targets = np.concatenate([batch["labels"].numpy() for batch in data.test_dataloader()])
    assert (found["test_target"] == targets).all()


def test_a_further_test_split_has_metrics_and_predictions_under_its_own_name():
    """Those of the test split are what they are without it."""
    pruner, alone, kept = make_pruner(), Predictions(), Predictions()
    data = make_data(eval_batch_size=40, test_rows=90)
    before = evaluate(make_trainer(callbacks=[alone], limit_val_batches=1.0), pruner, data)
    data.splits["test_other"] = data.splits["select"]
    metrics = evaluate(make_trainer(callbacks=[kept], limit_val_batches=1.0), pruner, data)
    assert {name: value for name, value in metrics.items() if not name.startswith("test_other_")} == before
    for name in ("loss", "accuracy", "f1", "matthews"):
        assert metrics[f"test_other_{name}"] == metrics[f"select_{name}"]
    assert metrics["test_accuracy"] != metrics["select_accuracy"]
    found = kept.arrays()
    for name, values in alone.arrays().items():
        assert np.array_equal(found[name], values)
    assert np.array_equal(found["test_other_prediction"], found["select_prediction"])
    assert "test_other/accuracy" not in evaluate(make_trainer(limit_val_batches=1.0), pruner, data, ("select",))
    assert pruner.tested == "test"


@pytest.mark.parametrize("counts", [(3, 3), (4, 3), (1, 0), (3, 3, 2)])
def test_parts_of_several_processes_are_put_together_in_turns(counts, monkeypatch):
    """Process r of n evaluates every n-th example from r on; the first ones have one more where it does not come out even."""
    whole = np.arange(sum(counts)) + 10
    parts = [whole[rank :: len(counts)].astype(np.int32) for rank in range(len(counts))]
    assert tuple(map(len, parts)) == counts
    monkeypatch.setattr("training.pruner.callbacks.gathered", lambda own: parts)
    kept = Predictions()
    own = torch.tensor(parts[0])
    logits = torch.nn.functional.one_hot(own.long(), 30).float()
    kept.on_test_batch_end(None, make_pruner(), logits, {"labels": own})
    found = kept.arrays()
    assert found["test_prediction"].tolist() == found["test_target"].tolist() == whole.tolist()
