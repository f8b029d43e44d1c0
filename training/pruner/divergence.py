"""Training that has gone wrong ends, in all processes together."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import Tensor

from gates.errors import GateError


def check_finite(loss: Tensor, trainer: pl.Trainer) -> None:
    """Whether a loss is a number in every process.

    Args:
        loss: of this process, a scalar.
        trainer: of the step.

    Raises:
        GateError: in all of them, if it is none in one.
    """
    finite = bool(torch.isfinite(loss))
    if trainer.world_size > 1:
        finite = trainer.strategy.reduce_boolean_decision(finite, all=True)
    if not finite:
        raise GateError(
            f"the loss is {float(loss.detach())} at step {trainer.global_step}; lower --model.learning_rate or set "
            "--trainer.gradient_clip_val and start again, or go on in another --run_dir from last.ckpt (--ckpt_path)"
        )
