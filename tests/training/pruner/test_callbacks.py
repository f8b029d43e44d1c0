"""What happens beside the training loop."""

from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from gates.errors import GateError
from tests.training.runs import STEPS_PER_EPOCH, make_data, make_pruner, make_trainer
from training.pruner.callbacks import CostInCheckpoints, EndOfPhase, PhaseCosts, Predictions
from training.pruner.module import evaluate
from training.runs.cost import Cost


class Clock(pl.Callback):
    """Time that goes on by a second with every batch, before other callbacks look at it."""

    def __init__(self):
        self.now = 0.0

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.now += 1.0


class Save(pl.Callback):
    def __init__(self, path, at):
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.at:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("training.runs.cost.time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def seconds(costs):
    return {phase: cost.seconds for phase, cost in costs.costs.items()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"finetune": 16.0, "prune": 16.0, "retrain": 16.0}),
        ({"finetune": 0.0, "retrain": 2.0}, {"prune": 16.0, "retrain": 32.0}),
    ],
)
def test_every_phase_is_charged_its_own_time(settings, expected, clock):
    costs = PhaseCosts()
    make_trainer(callbacks=[clock, costs]).fit(make_pruner(**settings), make_data())
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


def test_accumulated_batches_count_with_their_step(clock):
    costs = PhaseCosts()
    make_trainer(callbacks=[clock, costs], accumulate_grad_batches=2).fit(make_pruner(), make_data())
    assert seconds(costs) == {"finetune": 16.0, "prune": 16.0, "retrain": 16.0}


@pytest.mark.parametrize("at", [5, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 7, 2 * STEPS_PER_EPOCH + 3])
def test_a_run_that_goes_on_counts_whole(at, clock, tmp_path):
    first = PhaseCosts()
    stops = make_trainer(callbacks=[clock, first, Save(tmp_path / "at.ckpt", at)], max_steps=at + 2)
    stops.fit(make_pruner(), make_data())
    clock.now += 1000.0  # while nobody trained
    costs = PhaseCosts()
    again = make_trainer(callbacks=[clock, costs])
    again.fit(make_pruner(), make_data(), ckpt_path=tmp_path / "at.ckpt", weights_only=True)
    assert seconds(costs) == {"finetune": 16.0, "prune": 16.0, "retrain": 16.0}


def test_work_of_several_steps_keeps_its_cost_in_checkpoints(tmp_path):
    cost = Cost(12.5, 300.0)
    trainer = make_trainer(callbacks=[CostInCheckpoints(lambda: cost)], max_steps=1)
    trainer.fit(make_pruner(), make_data())
    trainer.save_checkpoint(tmp_path / "with.ckpt")
    saved = torch.load(tmp_path / "with.ckpt", weights_only=True)
    torch.save(saved | {"identity": "own"}, tmp_path / "with.ckpt")
    torch.save({"state_dict": {}, "identity": "own"}, tmp_path / "without.ckpt")
    assert CostInCheckpoints.read(tmp_path / "with.ckpt", "own") == cost
    assert CostInCheckpoints.read(tmp_path / "without.ckpt", "own") == Cost()
    with pytest.raises(GateError, match="is not of the experiment"):
        CostInCheckpoints.read(tmp_path / "with.ckpt", "another")


@pytest.mark.parametrize(("phase", "end", "mode"), [("finetune", 16, "open"), ("prune", 32, "masked")])
def test_training_ends_with_a_phase_and_a_checkpoint_of_it(phase, end, mode, tmp_path):
    pruner = make_pruner()
    trainer = make_trainer(callbacks=[EndOfPhase(tmp_path / "end.ckpt", phase)])
    trainer.fit(pruner, make_data())
    assert trainer.global_step == end
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
