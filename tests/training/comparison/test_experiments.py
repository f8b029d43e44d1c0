"""Experiments of one seed: what each costs, is made of, and leaves."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning as pl
import torch

from tests.training.runs import MODEL, make_data, make_options, make_setup
from training.comparison.cache import ExperimentCache, options_after_finetuning
from training.comparison.experiments import GATES_OVER_TIME, PREDICTIONS, WEIGHTS, Experiments, backbone_of, read_weights
from training.config import RefitOptions, ScratchTraining
from training.pruner.callbacks import AverageWeights, CostInCheckpoints
from training.runs.cost import Cost

MASK = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])


class StopsOnce(pl.Callback):
    """Ends the first training at a step, as a fault would."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.step = None
            raise RuntimeError("stopped")


class Watched(Experiments):
    """With further callbacks in every training."""

    def __init__(self, folder, *watching, scratch=None, save_every=2, **options):
        self.watching = watching
        setup = make_setup(**options)
        setup = replace(setup, run=replace(setup.run, save_every=save_every), scratch=scratch or ScratchTraining())
        super().__init__(setup, make_data(), cache=ExperimentCache(folder))

    def trainer(self, *callbacks, **overrides):
        return super().trainer(*self.watching, *callbacks, **overrides)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    """Of a short training; tests ask for whatever they need of it."""
    return Watched(tmp_path_factory.mktemp("experiments"), finetune=0.5, prune=0.5, retrain=0.5, learning_rate=1e-2)


def test_averaging_over_another_retrain_phase_is_another_experiment():
    """Of the same dense model, which knows nothing of the phases after its own."""
    found = [
        options_after_finetuning(make_options(budget=2, prune=prune, retrain=2 - prune), averages=last > 1)
        for last, prune in ((1, 1.0), (1, 1.75), (3, 1.0), (3, 1.75))
    ]
    assert {options["epochs"] for options in found} == {2.0}
    lengths = [{name: options.get(name) for name in ("prune", "retrain") if name in options} for options in found]
    assert lengths == [{}, {}, {"prune": 1.0, "retrain": 1.0}, {"prune": 1.75, "retrain": 0.25}]


@pytest.mark.integration
def test_another_length_is_another_experiment_of_the_same_dense_model(tmp_path):
    """Nothing that was trained for so long is found by a comparison that trains for longer, in one folder of experiments."""
    mask, keys = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0]), []
    for retrain in (0.25, 0.5):
        experiments = Watched(tmp_path, finetune=0.5, prune=0.5, retrain=retrain)
        dense = experiments.dense()
        found = [experiments.retrain(mask, start=dense, changes={"pipelined": False}), experiments.from_scratch(mask)]
        keys.append((dense.key, [one.key for one in found], [one.result["steps"] for one in found]))
    (first, shorter, few), (second, longer, many) = keys
    assert first == second
    assert not set(shorter) & set(longer)
    assert all(one < other for one, other in zip(few, many, strict=True))


@pytest.mark.integration
def test_new_weights_are_not_those_the_dense_model_began_with(tmp_path):
    class First(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            self.weights = {name: tensor.clone() for name, tensor in pl_module.backbone.state_dict().items()}
            self.steps = trainer.max_steps, pl_module.boundaries

    first = First()
    experiments = Watched(tmp_path, first)
    began = {name: tensor.clone() for name, tensor in experiments.pruner.backbone.state_dict().items()}
    found = experiments.from_scratch(MASK)
    assert found.result["steps"] == 3 * 16
    weights = [name for name, tensor in began.items() if tensor.dim() > 1 and "token_type" not in name]
    assert not [name for name in weights if torch.equal(first.weights[name], began[name])]
    longer = Watched(tmp_path, first, scratch=ScratchTraining(4.0, 1e-4)).from_scratch(MASK)
    assert longer.key != found.key
    assert longer.result["steps"] == 4 * 16


class Averaged(AverageWeights):
    """Notes the steps whose weights go into an average."""

    def __init__(self, last, every):
        super().__init__(last, every)
        self.at = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        before = self.count
        super().on_train_batch_end(trainer, pl_module, *args)
        if self.count != before:
            self.at.append(trainer.global_step)


@pytest.mark.integration
@pytest.mark.parametrize(("epochs", "end"), [(None, 3 * 16), (4.0, 4 * 16)])
def test_new_weights_are_averaged_over_the_last_checkpoints_of_their_training(tmp_path, epochs, end):
    """As those of a run are: it is one phase, whatever phases the comparison has."""
    averages = Averaged(5, 8)
    experiments = Watched(tmp_path, averages, retrain=0.25, prune=1.75, scratch=ScratchTraining(epochs))
    experiments.from_scratch(torch.ones(8))
    assert averages.at == [end - 32, end - 24, end - 16, end - 8, end]


def test_a_stopped_experiment_reports_its_whole_cost(tmp_path):
    experiments = Watched(tmp_path, StopsOnce(9))
    with pytest.raises(RuntimeError, match="stopped"):
        experiments.dense()
    (last,) = tmp_path.glob(".*/last.ckpt")
    content = torch.load(last, weights_only=True)
    assert content["global_step"] == 8 - 2  # the last one whose next loss was seen
    assert CostInCheckpoints.read(last, last.parent.name.removeprefix(".")).seconds > 0
    content[CostInCheckpoints.KEY] = {
        "seconds": 1000.0,
        "peak_memory_mb": 1e6,
        "forward_examples": 5e4,
        "backward_examples": 4e4,
    }
    torch.save(content, last)
    result = experiments.dense().result
    assert 1000 < result["seconds"] < 1000 + 300
    assert result["peak_memory_mb"] == 1e6
    assert result["forward_examples"] - result["backward_examples"] == 1e4
    assert 0 < result["backward_examples"] - 4e4 < 16 * 32
    assert result["steps"] == 16


def test_a_checkpoint_without_a_cost_has_cost_nothing_yet(tmp_path):
    torch.save({"state_dict": {}, "identity": "ab"}, tmp_path / "last.ckpt")
    assert CostInCheckpoints.read(tmp_path / "last.ckpt", "ab") == Cost()


@pytest.mark.integration
def test_each_training_ends_where_its_phase_does_and_is_done_once(experiments, monkeypatch):
    dense, learned = experiments.dense(), experiments.learn({"budget": 3})
    retrained = [experiments.retrain(MASK, start=start, changes={}) for start in (dense, learned)]
    assert [found.result["steps"] for found in (dense, learned, *retrained)] == [8, 8, 16, 8]
    for found, step in ((dense, 8), (learned, 16)):
        assert torch.load(found.path / WEIGHTS, weights_only=True)["global_step"] == step
        assert not (found.path / "last.ckpt").exists()
    course = pd.read_csv(learned.path / GATES_OVER_TIME)
    assert course["step"].between(9, 16).all()
    assert sum(learned.result["mask"]) == 3
    kept = np.load(retrained[0].path / PREDICTIONS)
    accuracy = (kept["test_prediction"] == kept["test_target"]).mean()
    assert accuracy == pytest.approx(retrained[0].result["test_accuracy"], abs=1e-6)
    monkeypatch.setattr(pl.Trainer, "fit", lambda *args, **more: pytest.fail("trained again"))
    assert experiments.dense() == dense
    assert experiments.learn({"budget": 3}) == learned
    assert experiments.retrain(MASK, start=dense, changes={}) == retrained[0]


def test_the_dense_weights_are_evaluated_whatever_was_trained_in_between(experiments):
    """The module is built once for experiments of the same options."""
    dense, values = experiments.dense(), torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 0])
    experiments.retrain(1 - MASK, start=dense, changes={})
    found = experiments.post_hoc(values)
    pruner = experiments.with_weights(dense, {})
    pruner.gates.set_mask_(values)
    trainer = Experiments.trainer(experiments)
    (metrics,) = trainer.test(pruner, datamodule=experiments.data, verbose=False)
    assert found.result["test_loss"] == metrics["test/loss"]
    own, weights = pruner.state_dict(), read_weights(dense.path / WEIGHTS)
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items() if name.startswith("backbone."))


@pytest.mark.integration
def test_what_takes_the_place_of_closed_heads_is_another_experiment(experiments):
    found = [experiments.post_hoc(MASK, replacement=how) for how in ("zero", "mean", "uniform", "constants")]
    assert len({one.key for one in found}) == 4
    assert len({one.result["test_loss"] for one in found}) == 4
    assert experiments.post_hoc(MASK).key == found[0].key
    only = experiments.post_hoc(MASK, splits=("select",))
    assert only.key != found[0].key
    assert only.result["select_loss"] == found[0].result["select_loss"]
    assert "test_loss" not in only.result


@pytest.mark.integration
def test_refitted_weights_are_for_their_mask_and_what_they_start_from(experiments):
    dense, learned = experiments.dense(), experiments.learn({"budget": 3})
    search = RefitOptions(ridges=[0.01, 1.0], rows=8)
    refits = [experiments.refit(MASK, search, start=start, changes={"budget": 3}) for start in (dense, learned)]
    refits += [experiments.refit(1 - MASK, search, start=dense, changes={})]
    assert len({refit.key for refit in refits}) == 3
    assert experiments.refit(MASK, search, start=dense, changes={}).key == refits[0].key
    for refit, start in zip(refits, (dense, learned, dense), strict=True):
        before, after = (read_weights(one.path / WEIGHTS) for one in (start, refit))
        changed = {name for name in after if "_extra_state" not in name and not torch.equal(after[name], before[name])}
        assert changed
        assert {name.rsplit(".", 2)[-2] for name in changed} == {"dense"}  # the outputs of attention and of feed-forward
        assert refit.result["reached"] == refit.result["refitted" if refit.result["is_applied"] else "unrefitted"]
    assert refits[0].result == refits[1].result  # the learned model's weights have rested, so that it is one refit
    of_both = [backbone_of(read_weights(refit.path / WEIGHTS)) for refit in refits[:2]]
    torch.testing.assert_close(*of_both, rtol=0, atol=0)
    plain, refitted = experiments.post_hoc(MASK), experiments.post_hoc(MASK, start=refits[0])
    assert plain.key != refitted.key
    assert plain.result["test_loss"] != refitted.result["test_loss"]
    trained = experiments.retrain(MASK, start=refits[0], changes={})
    assert trained.result["steps"] == experiments.retrain(MASK, start=dense, changes={}).result["steps"]


def test_another_seed_has_other_experiments(tmp_path):
    keys = set()
    for seed in (0, 1):
        setup = make_setup(from_scratch=MODEL).with_seed(seed)
        data = make_data()
        data.order_by(seed)
        experiments = Experiments(setup, data, cache=ExperimentCache(tmp_path))
        keys.add(experiments.dense_key["weights"])
        assert experiments.dense_key["seed"] == experiments.seed == seed
    assert len(keys) == 2
