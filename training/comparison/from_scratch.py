"""Voita's control: the structure that pruning found, trained from new weights with as many updates as the whole run."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from gates.hooks.generators import kept_generators
from training.comparison.identity import shape_of
from training.config import PrunerOptions, ScratchTraining
from training.pruner.module import HeadPruner

OTHER_SEED = 104_729
"""Between the seeds of the dense model and of new weights: with the dense model's own start, the control would be a rewound
part of it (a lottery ticket, Frankle and Carbin 2019), not a new model."""


def scratch_options(options: PrunerOptions, scratch: ScratchTraining, model: PreTrainedModel) -> PrunerOptions:
    """Options for training new weights: ordinary training of all of them in one cycle of the learning rate, without a dense
    model to learn from.

    Args:
        options: of the run that found the mask.
        scratch: the length of the training, that of all phases of the run by default, and its learning rate.
        model: whose shape the new one has.
    """
    return replace(
        options,
        backbone=None,
        dtype="float32",
        from_scratch=shape_of(model),
        gate="hard-concrete",
        budget=None,
        finetune=scratch.from_scratch_epochs or options.epochs,
        prune=0.0,
        retrain=0.0,
        swaps=0.0,
        refit=False,
        learning_rate=scratch.from_scratch_learning_rate or options.learning_rate,
        prune_learning_rate=None,
        freeze=None,
        freeze_while_pruning=None,
        distil=0.0,
        distil_hidden=0.0,
    )


@torch.no_grad()
def new_weights_(pruner: HeadPruner, seed: int) -> None:
    """Give the backbone the weights of a new model of its class and config, drawn from a seed."""
    with kept_generators(pruner.backbone, seed):
        new = type(pruner.backbone)(copy.deepcopy(pruner.backbone.config))
    own = pruner.backbone.state_dict()
    for name, tensor in new.state_dict().items():
        own[name].copy_(tensor)
