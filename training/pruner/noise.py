"""The random numbers of a training step: a function of the seed and the batch, so that a resumed run draws what an unbroken one
would have drawn."""

from __future__ import annotations

import torch

from gates.head_gates import HeadGates


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
