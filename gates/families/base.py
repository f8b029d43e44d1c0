"""What the families of learned gates share: one trainable number per gate, and how far the pruning has come."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

LOG_ALPHA_LIMIT = math.log(100)
"""``|log_alpha|`` is kept below this, so that no gate is lost to a vanishing gradient."""

NOISE_MARGIN = 1e-6
"""Uniform noise is drawn from [margin, 1 - margin], so that its logarithms are finite."""


def uniform_noise(like: Tensor, *, draws: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Uniform noise inside (0, 1), float32.

    Args:
        like: tensor ``[gates]`` on the device that the noise is drawn on.
        draws: independent draws; None for one without a dimension of its own.
        generator: source of the noise, on that device; the global one by default.

    Returns:
        ``[gates]`` or ``[draws, gates]``.
    """
    shape = like.shape if draws is None else (draws, *like.shape)
    return torch.rand(shape, generator=generator, device=like.device) * (1 - 2 * NOISE_MARGIN) + NOISE_MARGIN


def annealed(start: float, end: float, progress: float) -> float:
    """A temperature on its log-linear way: ``start ** (1 - progress) * end ** progress``, progress from 0 to 1."""
    return float(start ** (1 - progress) * end**progress)


class LearnedGates(nn.Module, ABC):
    """A vector of gates with one trainable ``log_alpha`` each: what every family is.

    All families rank heads by ``log_alpha``, higher kept first, and have no other state, so that a checkpoint of one loads
    into another. A call gives float32 gates in [0, 1], also under autocast and for half-precision models.

    Args:
        gates: number of gates.
        initial_log_alpha: value at which all of them start.

    ``progress`` says how far the pruning has come, 0 to 1, for families that change on the way; whoever trains sets it. A
    module that nobody leads is at the end of its way.
    """

    def __init__(self, gates: int, initial_log_alpha: float) -> None:
        super().__init__()
        self.initial_log_alpha = float(initial_log_alpha)
        self.log_alpha = nn.Parameter(torch.full((gates,), self.initial_log_alpha))
        self.progress = 1.0

    @abstractmethod
    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Gates to train with (``[gates]``, or ``[draws, gates]``) in training mode, deterministic ones ``[gates]`` otherwise.

        Args:
            generator: source of the noise; the global one by default.
            draws: number of examples, for each of which gates are drawn where a family is random; None for one draw for all.
        """

    @abstractmethod
    def open_probability(self) -> Tensor:
        """How open every gate is in expectation, ``[gates]``: what a price is paid for."""

    @torch.no_grad()
    def reset_(self) -> None:
        """Bring all gates back to where they start."""
        self.log_alpha.fill_(self.initial_log_alpha)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring ``log_alpha`` back into its limits; call it after every optimiser step."""
        self.log_alpha.clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
