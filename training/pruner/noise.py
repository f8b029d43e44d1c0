"""The random numbers of a training step: a function of the seed and the batch, so that a resumed run draws what an unbroken one
would have drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from gates.head_gates import HeadGates

BETWEEN_RESTARTS = 15_485_863
"""Between the seeds of their noise; larger than seeds that people give, so that no restart has the noise of another run."""


def seed_step_(gates: HeadGates, *, seed: int, batch: int, rank: int, device: torch.device) -> None:
    """Seed the noise of gates and dropout for one batch.

    One draw of gates for the whole batch is the same in all processes; draws per example and dropout are each process's own.

    Args:
        gates: whose noise it is.
        seed: of the run.
        batch: number of the batch in the run.
        rank: number of this process.
        device: of the gates.
    """
    shared = (seed * 1_000_003 + batch) * 4096
    own = shared + 1 + rank
    gates.generator = torch.Generator(device).manual_seed(shared if gates.draw_per == "batch" else own)
    torch.manual_seed(own)


class Seeded(Protocol):
    """What has a seed of its noise."""

    seed: int


@contextmanager
def noise_of(module: Seeded, restart: int) -> Iterator[None]:
    """Other noise for each restart for the length of a ``with`` block; the first, 0, has that of the module's own seed."""
    own = module.seed
    module.seed = own + restart * BETWEEN_RESTARTS
    try:
        yield
    finally:
        module.seed = own
