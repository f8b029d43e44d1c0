"""Callbacks of training: costs, ends of phases, and predictions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gates.errors import GateError
from tests.training.pruner.fits import N, Save, fit, make_data
from tests.training.runs import make_pruner, make_trainer
from training.pruner.callbacks import CostInCheckpoints, EndOfPhase, Predictions
from training.pruner.module import evaluate
from training.runs.cost import Cost, measured


def test_work_of_several_steps_keeps_its_cost_in_checkpoints(tmp_path):
    cost = Cost(12.5, 300.0)
    fit(None, CostInCheckpoints(lambda: SimpleNamespace(cost=cost)), Save(tmp_path, 1), max_steps=1)
    path = tmp_path / "1.ckpt"
    torch.save(torch.load(path, weights_only=True) | {"identity": "own"}, path)
    assert CostInCheckpoints.read(path, "own") == cost
    with pytest.raises(GateError, match="is not of the experiment"):
        CostInCheckpoints.read(path, "another")


def test_validation_is_no_part_of_what_training_costs():
    pruner, data = make_pruner(), make_data()
    with measured(torch.device("cpu"), pruner.gates) as cost:
        make_trainer(callbacks=[CostInCheckpoints(lambda: cost)], limit_val_batches=1.0).fit(pruner, data)
    examples = 3 * len(data.splits["train"])
    assert (cost.cost.forward_examples, cost.cost.backward_examples) == (pytest.approx(examples), pytest.approx(examples))


@pytest.mark.parametrize(("phase", "end", "mode"), [("finetune", N, "open"), ("prune", 2 * N, "masked")])
def test_training_ends_with_a_phase_and_a_checkpoint_of_it(phase, end, mode, tmp_path):
    pruner = fit(None, EndOfPhase(tmp_path / "end.ckpt", phase))
    assert pruner.trainer.global_step == end
    assert pruner.gates.mode == mode
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["global_step"] == end


def test_training_of_a_phase_does_not_begin_behind_its_end(tmp_path):
    fit(None, EndOfPhase(tmp_path / "prune.ckpt", "prune"))
    with pytest.raises(
        GateError, match=f"is of step {2 * N}, but fine-tuning ends after {N}; give --ckpt_path one of fine-tuning"
    ):
        fit(None, EndOfPhase(tmp_path / "dense.ckpt", "finetune"), ckpt_path=tmp_path / "prune.ckpt")
    assert not (tmp_path / "dense.ckpt").exists()


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
