"""New weights: whose they are, and that all of them are trained without a teacher."""

import pytest
import pytorch_lightning as pl
import torch

from tests.training.runs import STEPS_PER_EPOCH, make_data, make_options, make_pruner, make_trainer
from training.comparison.experiments import new_weights_, scratch_options
from training.config import ScratchTraining
from training.pruner.module import HeadPruner

EVERYTHING = {
    "distil": 0.5, "distil_hidden": 0.5, "freeze": ["pooler"], "freeze_while_pruning": ["embeddings"], "swaps": 40,
    "gate": "clamped-linear", "prune_learning_rate": 1e-4,
}  # fmt: skip
"""What a run may do that training of new weights does not."""


class Watch(pl.Callback):
    """The weights after every step, and what is in force."""

    def __init__(self):
        self.weights, self.modes, self.taught = {}, set(), set()

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights[trainer.global_step] = {n: p.detach().clone() for n, p in pl_module.backbone.named_parameters()}
        self.modes.add(pl_module.gates.mode)
        self.taught.add(pl_module.teacher is not None)


def train(mask, seed=5):
    first = make_pruner(**EVERYTHING)
    options = scratch_options(first.options, ScratchTraining(), first.backbone)
    torch.manual_seed(1)
    pruner, data, watch = HeadPruner(options), make_data(), Watch()
    pruner.build(data.task, data.tokenizer)
    new_weights_(pruner, seed)
    with pruner.fixed_to(mask):
        make_trainer(callbacks=[watch]).fit(pruner, data)
    return pruner, watch


@pytest.mark.integration
def test_all_new_weights_are_trained_with_the_mask_and_without_a_teacher():
    mask = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0])
    pruner, watch = train(mask)
    assert len(watch.weights) == 3 * STEPS_PER_EPOCH  # as many as all phases have
    assert (watch.modes, watch.taught) == ({"masked"}, {False})
    assert torch.equal(pruner.gates.mask, mask)
    for part in ("pooler", "word_embeddings"):  # nothing rests in ordinary training
        name = next(name for name in watch.weights[1] if part in name)
        assert not torch.equal(watch.weights[1][name], watch.weights[40][name])
    again, _ = train(mask)
    for name, tensor in pruner.backbone.state_dict().items():
        assert torch.equal(tensor, again.backbone.state_dict()[name]), name


def test_new_weights_are_a_function_of_their_seed_and_take_no_others_random_numbers():
    pruner = make_pruner()
    dense = {name: tensor.clone() for name, tensor in pruner.backbone.state_dict().items()}
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed * 100)
        state = torch.get_rng_state()
        new_weights_(pruner, seed)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(pruner.backbone.classifier.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], dense["classifier.weight"])


@pytest.mark.parametrize(
    ("scratch", "epochs", "rate"),
    [(ScratchTraining(), 3.5, 1e-3), (ScratchTraining(from_scratch_epochs=7.0, from_scratch_learning_rate=0.1), 7.0, 0.1)],
)
def test_the_length_and_the_learning_rate_are_the_runs_or_as_asked(scratch, epochs, rate):
    options = make_options(finetune=1.5, **EVERYTHING)
    found = scratch_options(options, scratch, make_pruner().backbone)
    assert (found.epochs, found.finetune, found.learning_rate) == (epochs, epochs, rate)
    assert (found.budget, found.prune_learning_rate, found.swaps, found.distils) == (None, None, 0.0, False)
    assert (found.freeze, found.freeze_while_pruning) == (None, None)
