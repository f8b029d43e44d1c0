"""Layers that peft has put a LoRA adapter, or another one, around: the layer is its ``base_layer``."""

from __future__ import annotations

from torch import nn

from gates.errors import GateError


def without_adapter(module: nn.Module) -> nn.Module:
    """The layer itself; a module without an adapter as it is."""
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        module = base
    return module


def check_merged(model: nn.Module) -> None:
    """Whether a model's weights are all that acts on their inputs.

    Raises:
        GateError: for adapters beside them.
    """
    for name, module in model.named_modules():
        if without_adapter(module) is not module:
            raise GateError(
                f"the layer {name!r} carries an adapter ({type(module).__module__.split('.')[0]}'s {type(module).__name__}), "
                "whose weights are not in its own; merge first: take the gates off (unload() or detach()), call peft's "
                "merge_and_unload(), and go on with the model that it returns"
            )
