"""Roles at many moments: after every epoch of a run that is trained once more, and of the checkpoints that a training left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as pl
import torch
from torch import Tensor

from gates.errors import GateError
from training.analysis.closing import Closing, closing_times
from training.analysis.model import ONE_DEVICE, DenseModel
from training.analysis.observed import ObservedModel, checkpoints_in, observe_folder, observe_run
from training.analysis.role_passes import RolePasses
from training.analysis.role_texts import RoleTexts
from training.analysis.roles import role_table
from training.pruner.module import HeadPruner
from training.runs import progress
from training.scoring.subject import at_rest
from training.setup import make_pruner, make_trainer


@dataclass(frozen=True)
class Look:
    """What heads do at one moment.

    Args:
        time: epochs of the run, or the number of the checkpoint.
        phase: of the run; ``start`` in front of it, and empty for a checkpoint.
        roles: a row for each head that is not pruned, see :func:`training.analysis.roles.role_table`.
        gates: values of the gates of all heads, pruned ones included, ``[heads]`` on the CPU; None for a checkpoint.
    """

    time: float
    phase: str
    roles: pd.DataFrame
    gates: Tensor | None = None


@dataclass(frozen=True)
class Course:
    """A training as it was looked at.

    Args:
        looks: in order.
        unit: of their times.
        closing: when gates fell below one half for good, as a share of the prune phase; None for checkpoints, and for a run
            that learned no gates.
        same: whether the dense weights are those of the run to the last bit; None for checkpoints.
    """

    looks: list[Look]
    unit: str
    closing: Closing | None = None
    same: bool | None = None


class LookAtRoles(pl.Callback):
    """Before training, after every epoch and at the end of every phase: roles and gates. Training goes on between as if nobody
    had looked.

    All gates are open for it, but those that are pruned. While weights rest roles stay, and are not looked for again.

    Args:
        run: whose pruner is in training.
        texts: what the model reads.
    """

    def __init__(self, run: DenseModel, texts: RoleTexts) -> None:
        self.run, self.texts = run, texts
        self.per_epoch = len(run.data.batches_of_run(epochs=1, first=0, rank=0, world=1))
        self.looks: list[Look] = []
        self.dense: dict[str, Tensor] = {}
        self.pruning: list[tuple[int, Tensor]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, HeadPruner)
        self._look(pl_module, 0.0, "start")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, HeadPruner)
        batches, step = args[2] + 1, trainer.global_step
        stepped = batches % trainer.accumulate_grad_batches == 0
        if stepped and step == pl_module.boundaries[0]:
            self.dense = {name: tensor.cpu().clone() for name, tensor in pl_module.backbone.state_dict().items()}
        if stepped and pl_module.boundaries[0] < step <= pl_module.boundaries[1]:
            self.pruning.append((step, pl_module.gates.values().cpu()))
        if batches % self.per_epoch == 0 or (stepped and step in pl_module.boundaries):
            self._look(pl_module, batches / self.per_epoch, pl_module.phase(max(0, step - 1)))

    def _look(self, pruner: HeadPruner, time: float, phase: str) -> None:
        gates = pruner.gates
        values = gates.values()
        heads = gates.to_heads(values).cpu()
        if phase == "prune" and pruner.options.pipelined and self.looks:
            self.looks.append(replace(self.looks[-1], time=time, phase=phase, gates=heads))
            return
        mask = (values > 0).to(pruner.device, torch.float32) if gates.mode == "masked" else None
        with at_rest(pruner):
            observed = observe_run(replace(self.run, pruner=pruner, device=pruner.device), mask)
            self.looks.append(Look(time, phase, roles_at(observed, self.texts), heads))


def roles_at(observed: ObservedModel, texts: RoleTexts) -> pd.DataFrame:
    """The table of roles of a model as it is now."""
    return role_table(observed, RolePasses(observed, texts).run())


def looks_of_run(dense: DenseModel, texts: RoleTexts) -> Course:
    """A run trained once more, from its configuration and seed, looked at after every epoch.

    Args:
        dense: of the run.
        texts: what the model reads.
    """
    again = replace(dense, pruner=make_pruner(dense.setup, dense.data))
    recorder = LookAtRoles(again, texts)
    trainer = make_trainer(dense.setup, recorder, limit_val_batches=0, **ONE_DEVICE)
    again.pruner.train()
    trainer.fit(again.pruner, dense.data)
    dense.data.trainer = None
    kept = dense.pruner.backbone.state_dict()
    same = all(torch.equal(kept[name].cpu(), tensor) for name, tensor in recorder.dense.items()) if recorder.dense else None
    return Course(recorder.looks, "epoch", _closing(again.pruner, recorder.pruning), same)


def _closing(pruner: HeadPruner, pruning: list[tuple[int, Tensor]]) -> Closing | None:
    """From the gates after every step of the prune phase, which begins with all of them open."""
    if not pruning:
        return None
    steps = np.array([pruner.boundaries[0], *(step for step, _ in pruning)], dtype=float)
    values = torch.stack([torch.ones(pruner.gates.size), *(values for _, values in pruning)]).double().numpy()
    sites = tuple((site.label, size) for site, size in zip(pruner.gates.sites, pruner.gates.sizes, strict=True))
    kept = int((pruner.gates.values() > 0).sum())
    return Closing("learned", kept, sites, closing_times(steps, values)[None])


def looks_of_checkpoints(path: str, read: Callable[[ObservedModel], RoleTexts]) -> Course:
    """The checkpoints in a folder, one model after the other in memory.

    Args:
        path: with a folder for each.
        read: what the models read, with the tokenizer of the first one.

    Raises:
        GateError: if they are not of one model.
    """
    looks: list[Look] = []
    texts, vocabulary = None, None
    for number, folder in progress.track(checkpoints_in(path), "looking at checkpoints"):
        observed = observe_folder(str(folder))
        if texts is None:
            texts, vocabulary = read(observed), observed.tokenizer.get_vocab()
        if observed.tokenizer.get_vocab() != vocabulary:
            raise GateError(
                f"{str(folder)!r} has another tokenizer than the checkpoint before; give checkpoints of one training"
            )
        table = roles_at(observed, texts)
        if looks and table[["site", "head"]].values.tolist() != looks[0].roles[["site", "head"]].values.tolist():
            raise GateError(f"{str(folder)!r} has other heads than the checkpoint before; give checkpoints of one training")
        looks.append(Look(number, "", table))
    return Course(looks, "checkpoint")
