"""Short fits of a tiny model: an epoch has eight steps."""

from __future__ import annotations

from contextlib import nullcontext

import pytorch_lightning as pl
import torch

from tests.training import runs
from tests.training.runs import make_pruner, make_trainer

N = 8
"""Steps of an epoch."""


def make_data(**settings):
    return runs.make_data(**{"train_rows": 16 * N, **settings})


def fit(pruner=None, *callbacks, fixed=None, ckpt_path=None, **settings):
    """Train a pruner, by default a plain one, with fixed gates if they are given; return it."""
    pruner = pruner or make_pruner()
    trainer = make_trainer(callbacks=list(callbacks), **settings)
    with nullcontext() if fixed is None else pruner.fixed_to(fixed):
        trainer.fit(pruner, make_data(), ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return pruner


def state(pruner):
    return {name: tensor.clone() for name, tensor in pruner.state_dict().items() if "_extra_state" not in name}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


class Save(pl.Callback):
    """Keeps checkpoints of some steps in a folder."""

    def __init__(self, folder, *steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class Each(pl.Callback):
    """Calls a function of trainer and module after every training step."""

    def __init__(self, note):
        self.note = note

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.note(trainer, pl_module)
