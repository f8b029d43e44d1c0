"""Voita's control: the structure that pruning found, trained from new weights with as many updates as the whole run."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gates.errors import GateError
from training.data.base import TaskData
from training.pruner.evaluation import TrainerFactory, evaluate
from training.pruner.module import HeadPruner

OTHER_SEED = 104_729
"""Between the seeds of the dense model and of new weights: with the dense model's own start, the control would be a rewound
part of it (a lottery ticket, Frankle and Carbin 2019), not a new model."""


def check_length(finetune: float, epochs: float | None) -> None:
    """Raises :class:`GateError` if nothing says how long new weights are to be trained: a run without a finetune phase is short,
    because its dense model was trained before."""
    if finetune == 0 and epochs is None:
        raise GateError(
            "models trained from scratch get as many updates as the run by default, but here the dense model was trained "
            "before it (finetune is 0); give the epochs of both together, for example --from_scratch_epochs 16"
        )
    if epochs is not None and not epochs > 0:
        raise GateError(f"--from_scratch_epochs is {epochs}; expected a number above 0")


def scratch_options(settings: Mapping[str, Any], *, epochs: float | None, learning_rate: float | None) -> dict[str, Any]:
    """Options of the module for training new weights: ordinary training in one cycle of the learning rate, without a dense
    model to learn from. It is all one phase, so that averaging of weights takes its last checkpoints.

    Args:
        settings: of the run that found the mask.
        epochs: of training; None for as many as all phases of the run have.
        learning_rate: at its peak; None for the run's.
    """
    whole = settings["finetune"] + settings["prune"] + settings["retrain"]
    return {
        "finetune": 0.0, "prune": 0.0, "retrain": epochs or whole, "prune_learning_rate": None, "distil": 0.0,
        "distil_hidden": 0.0, "learning_rate": learning_rate or settings["learning_rate"],
    }  # fmt: skip


def train_from_scratch(
    pruner: HeadPruner,
    data: TaskData,
    mask: Tensor,
    make_trainer: TrainerFactory,
    *,
    method: str,
    epochs: float | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """A row of the comparison, stage ``from scratch``: new weights, and the mask in force from the first step.

    All weights are trained, for as many updates as the run had in all its phases, or as ``epochs`` says where the dense model
    was trained before (Voita et al. 2019, table 3), as :func:`scratch_options` says. The pruner leaves as it came.

    Args:
        pruner: after training.
        data: its data.
        mask: 0/1 ``[gates]``.
        make_trainer: makes trainers with the run's own settings.
        method: that found the mask.
        epochs: of training; as many as the run's by default.
        learning_rate: at its peak; the run's by default.
        seed: of the run; the new weights have another.
    """
    start = time.perf_counter()
    state = {name: tensor.detach().cpu().clone() for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor)}
    settings, mode, gates_mask = dict(pruner.hparams), pruner.gates.mode, pruner.gates.mask.detach().cpu().clone()
    frozen, while_pruning = pruner.frozen, pruner.frozen_while_pruning
    row: dict[str, Any] = {"method": method, "stage": "from scratch", "heads": pruner.gates.open_heads(mask)}
    try:
        new_weights_(pruner, seed + OTHER_SEED)
        pruner.frozen_while_pruning = []
        for parameter in frozen:
            parameter.requires_grad_(True)
        pruner.hparams.update(scratch_options(settings, epochs=epochs, learning_rate=learning_rate))
        pruner.fixed_mask = mask
        pruner.train()
        trainer = make_trainer(limit_val_batches=0)
        trainer.fit(pruner, data)
        row |= evaluate(make_trainer(), pruner, data)
        return row | {"steps": trainer.global_step, "seconds": round(time.perf_counter() - start, 2)}
    finally:
        pruner.fixed_mask = None
        pruner.hparams.update(settings)
        pruner.frozen_while_pruning = while_pruning
        for parameter in frozen:
            parameter.requires_grad_(False)
        pruner.load_state_dict(state, strict=False)
        pruner.gates.set_mask_(gates_mask.to(pruner.device))
        pruner.gates.mode = mode


@torch.no_grad()
def new_weights_(pruner: HeadPruner, seed: int) -> None:
    """Give the backbone the weights of a new model of its class and config, drawn from a seed."""
    generator_state = torch.get_rng_state()
    try:
        torch.manual_seed(seed)
        new = type(pruner.backbone)(copy.deepcopy(pruner.backbone.config))
    finally:
        torch.set_rng_state(generator_state)
    own = pruner.backbone.state_dict()
    for name, tensor in new.state_dict().items():
        own[name].copy_(tensor)
