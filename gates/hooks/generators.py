"""The random number generators that a model draws from, kept as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def kept_generators(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Restore the generators of the CPU and of the model's devices after the ``with`` block.

    The generators of other devices are not touched. ``torch.manual_seed`` would seed them too, at once or when they are
    initialised.

    Args:
        model: The model that runs in the block.
        seed: A seed for these generators; None leaves them as they are.

    >>> state = torch.get_rng_state()
    >>> with kept_generators(nn.Dropout(), seed=0):
    ...     _ = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), state)
    True
    """
    devices = {parameter.device for parameter in model.parameters()}
    generators = [torch.default_generator, *(_generator(device) for device in devices if device.type in ("cuda", "mps"))]
    states = [generator.get_state() for generator in generators]
    try:
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    torch.cuda.init()  # no generators exist before
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
