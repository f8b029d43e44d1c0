"""Memory for time: activations of a layer that are computed anew in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from gates.errors import GateError


def checkpoint_activations_(model: PreTrainedModel, *, rests: bool = False) -> None:
    """Have a model keep only what goes into each layer until the backward pass, by Transformers' own means.

    Draws of dropout are repeated, and gates are drawn before the model runs, so that a layer computes the second time what it
    did the first.

    Args:
        model: in training, or in evaluation mode while it rests.
        rests: whether it is to do so at rest, where Transformers would not. Evaluation and scores afterwards are as without.

    Raises:
        GateError: if the model does not support it.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # of earlier ones
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise GateError(
            f"{type(model).__name__} does not support activation checkpointing in Transformers; leave out "
            "--model.checkpoint_activations"
        ) from error
    for layer in model.modules():
        if rests and isinstance(layer, GradientCheckpointingLayer):
            layer.training = True  # by which Transformers goes
            vars(layer)["_gradient_checkpointing_func"] = partial(_at_rest, layer)


def checkpoints_activations(model: nn.Module) -> bool:
    """Whether any part of a model does."""
    return any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def _at_rest(layer: GradientCheckpointingLayer, run: Callable[..., Any], *inputs: Any) -> Any:
    """A layer in evaluation mode, both times."""

    def resting(*inputs: Any) -> Any:
        layer.training = False
        try:
            return run(*inputs)
        finally:
            layer.training = True

    return checkpoint(resting, *inputs, use_reentrant=False)
