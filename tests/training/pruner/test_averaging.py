import pytorch_lightning as pl
import torch

from tests.training.pruner.fits import N, fit
from tests.training.runs import make_pruner
from training.pruner.callbacks import AverageWeights


class Record(pl.Callback):
    """The weights after every step, as they are before anything replaces them."""

    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.after[trainer.global_step] = {n: p.detach().clone() for n, p in pl_module.backbone.named_parameters()}


def mean_of(record, steps):
    return {name: torch.stack([record.after[step][name] for step in steps]).mean(0) for name in record.after[steps[0]]}


def test_the_end_of_the_finetune_and_of_the_run_are_averages_of_their_own_phase():
    before, after, pruner = Record(), Record(), make_pruner()
    fit(pruner, before, AverageWeights(3, 2), after)
    for end in (N, 3 * N):
        torch.testing.assert_close(after.after[end], mean_of(before, [end - 4, end - 2, end]))
    torch.testing.assert_close(after.after[N - 1], before.after[N - 1])
    torch.testing.assert_close(dict(pruner.backbone.named_parameters()), after.after[3 * N])


def test_checkpoints_of_an_earlier_phase_stay_out_of_the_average():
    before, after, pruner = Record(), Record(), make_pruner(retrain=0.5)
    fit(pruner, before, AverageWeights(10, 2), after)
    end = max(before.after)
    retraining = list(range(end, pruner.boundaries[1], -2))
    assert 1 < len(retraining) < 10
    torch.testing.assert_close(after.after[end], mean_of(before, retraining))


def test_frozen_weights_stay_whatever_the_number_of_checkpoints():
    """In single precision the mean of five equal numbers is often another one."""
    callback, layer = AverageWeights(5, 1), torch.nn.Linear(50, 50)
    before = layer.weight.detach().clone()
    for _ in range(5):
        callback._add(layer)
    with torch.no_grad():
        callback._replace(layer)
    assert torch.equal(layer.weight, before)


def test_weights_that_are_frozen_while_pruning_move_in_the_finetune_only():
    record = Record()
    fit(make_pruner(freeze_while_pruning=["embeddings"]), record)
    name = next(name for name in record.after[1] if "word_embeddings" in name)
    other = next(name for name in record.after[1] if "layer.0" in name and "query.weight" in name)
    assert not torch.equal(record.after[1][name], record.after[N][name])
    assert torch.equal(record.after[N][name], record.after[3 * N][name])
    assert not torch.equal(record.after[N][other], record.after[3 * N][other])
