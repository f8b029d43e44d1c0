"""The Hard-Concrete distribution over gates (Louizos, Welling and Kingma 2018, equations 10 to 12).

A gate ``z`` in [0, 1] is a stretched and clipped binary Concrete variable. It is differentiable in its one
parameter ``log_alpha`` and yet takes the values 0 and 1 exactly with positive probability.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh

from gates.errors import GateError

LOG_ALPHA_LIMIT = math.log(100)
"""``|log_alpha|`` is kept below this, so that no gate is lost to a vanishing gradient."""

NOISE_MARGIN = 1e-6
"""Uniform noise is drawn from [margin, 1 - margin], so that its logarithms are finite."""


def uniform_noise(like: Tensor, *, draws: int | None = None, generator: torch.Generator | None = None) -> Tensor:
    """Draw uniform noise inside (0, 1), float32, ``[gates]`` or ``[draws, gates]``, on the device of ``like`` ``[gates]``."""
    shape = like.shape if draws is None else (draws, *like.shape)
    return torch.empty(shape, device=like.device).uniform_(NOISE_MARGIN, 1 - NOISE_MARGIN, generator=generator)


def annealed(start: float, end: float, progress: float) -> float:
    """Interpolate a temperature log-linearly, ``start ** (1 - progress) * end ** progress``, with progress from 0 to 1."""
    return float(start ** (1 - progress) * end**progress)


class LearnedGates(nn.Module, ABC):
    """The base class of all families: a vector of gates with one trainable ``log_alpha`` each.

    All families rank heads by ``log_alpha`` and have no other state, so a checkpoint of one family loads into another. A call
    returns float32 gates in [0, 1], also under autocast and for half-precision models.

    Attributes:
        progress: The finished share of the pruning, from 0 to 1, for families that change during training. The training loop
            sets it; the default is 1.
    """

    def __init__(self, gates: int, initial_log_alpha: float) -> None:
        super().__init__()
        self.initial_log_alpha = float(initial_log_alpha)
        self.log_alpha = nn.Parameter(torch.full((gates,), self.initial_log_alpha))
        self.progress = 1.0

    @abstractmethod
    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Return gates ``[gates]`` or ``[draws, gates]`` in training mode, else deterministic gates ``[gates]``.

        Args:
            generator: The generator of the noise; the global one by default.
            draws: The number of examples with their own draw; None for one draw for all.
        """

    @abstractmethod
    def open_probability(self) -> Tensor:
        """Return the expected openness of every gate, ``[gates]``, to which a price applies."""

    @torch.no_grad()
    def reset_(self) -> None:
        """Reset all gates to their initial value."""
        self.log_alpha.fill_(self.initial_log_alpha)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Clamp ``log_alpha`` to its limits; call it after every optimiser step."""
        self.log_alpha.clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


@dataclass(frozen=True)
class Stretch:
    """The temperature and the interval (low, high) that a binary Concrete variable is stretched to.

    Args:
        temperature: The temperature beta. Voita et al. 2019 use 0.33, Louizos et al. 2018 two thirds.
        low: The lower end, below 0.
        high: The upper end, above 1.

    >>> closed, opened = evaluation_gates(torch.tensor([-2.4, 2.4]), Stretch(temperature=0.33, low=-0.1, high=1.1)).tolist()
    >>> closed, opened
    (0.0, 1.0)
    """

    temperature: float = 0.33
    low: float = -0.1
    high: float = 1.1

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise GateError(f"temperature is {self.temperature}; it must be above 0, for example 0.33")
        if not (self.low < 0 and self.high > 1):
            raise GateError(f"stretch is ({self.low}, {self.high}); it must contain [0, 1], for example (-0.1, 1.1)")


DEFAULT_STRETCH = Stretch()


def sample_gates(
    log_alpha: Tensor,
    stretch: Stretch = DEFAULT_STRETCH,
    *,
    draws: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw gates in [0, 1], float32, from ``log_alpha`` ``[gates]``: reparametrised, so gradients reach it.

    Args:
        draws: The number of independent draws, ``[draws, gates]``; None for one draw ``[gates]``.
        generator: The generator of the noise, on ``log_alpha``'s device; the global one by default.
    """
    log_alpha = log_alpha.float()
    uniform = uniform_noise(log_alpha, draws=draws, generator=generator)
    logits = (torch.logit(uniform) + log_alpha) / stretch.temperature
    return _stretch_and_clip(torch.sigmoid(logits), stretch)


def evaluation_gates(log_alpha: Tensor, stretch: Stretch = DEFAULT_STRETCH) -> Tensor:
    """Return the deterministic gates for evaluation (Louizos et al. 2018, equation 13), float32.

    With the default stretch, a gate is exactly 0 if ``log_alpha <= -log 11``, and exactly 1 if ``log_alpha >= log 11``.
    """
    return _stretch_and_clip(torch.sigmoid(log_alpha.float()), stretch)


def open_probability(log_alpha: Tensor, stretch: Stretch = DEFAULT_STRETCH) -> Tensor:
    """Return P(z > 0) in closed form; the sum over heads is the expected L0 norm (equation 12)."""
    return torch.sigmoid(log_alpha.float() - stretch.temperature * math.log(-stretch.low / stretch.high))


def _stretch_and_clip(unit: Tensor, stretch: Stretch) -> Tensor:
    return hardtanh(unit * (stretch.high - stretch.low) + stretch.low, 0.0, 1.0)  # clamp has a backward pass of five operations


class HardConcrete(LearnedGates):
    """A vector of Hard-Concrete gates with one trainable ``log_alpha`` each.

    Args:
        stretch: The temperature, or its initial value if it is annealed, and the stretch interval.
        initial_log_alpha: The initial value of every gate. The default, 2.5, is *near-open*: every evaluation gate is exactly
            1, so attaching gates does not change a trained model.
        straight_through: Whether every gate above 0 is rounded up to 1 in the forward pass, with the gradient of the soft
            gate.
        anneal: The temperature at ``progress`` 1, reached log-linearly; None for a constant temperature. Under a low
            temperature, training gates are mostly 0 or 1.
        straight_through_from: The ``progress`` from which gates are rounded as by ``straight_through``; 1 for never.

    In ``train()`` mode a call draws gates, in ``eval()`` mode it returns the evaluation gates.

    >>> gates = HardConcrete(4)
    >>> gates.eval()()
    tensor([1., 1., 1., 1.], grad_fn=<HardtanhBackward0>)
    >>> gates.train()(draws=3).shape
    torch.Size([3, 4])
    """

    def __init__(
        self,
        gates: int,
        *,
        stretch: Stretch = DEFAULT_STRETCH,
        initial_log_alpha: float = 2.5,
        straight_through: bool = False,
        anneal: float | None = None,
        straight_through_from: float = 1.0,
    ) -> None:
        super().__init__(gates, min(max(initial_log_alpha, -LOG_ALPHA_LIMIT), LOG_ALPHA_LIMIT))
        if anneal is not None and not 0 < anneal <= stretch.temperature:
            raise GateError(
                f"anneal is {anneal}; expected a temperature above 0 and at most the first one, {stretch.temperature}"
            )
        if not 0 <= straight_through_from <= 1:
            raise GateError(f"straight_through_from is {straight_through_from}; expected a share from 0 to 1 (never)")
        self.first_stretch = stretch
        self.straight_through = straight_through
        self.anneal = anneal
        self.straight_through_from = straight_through_from

    @property
    def stretch(self) -> Stretch:
        """Return the temperature and the stretch interval at the present progress."""
        if self.anneal is None:
            return self.first_stretch
        temperature = annealed(self.first_stretch.temperature, self.anneal, self.progress)
        return replace(self.first_stretch, temperature=temperature)

    @property
    def rounds(self) -> bool:
        """Return whether gates are rounded at the present progress."""
        return self.straight_through or self.progress >= self.straight_through_from < 1

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Return drawn gates, ``[gates]`` or ``[draws, gates]``, in training mode, else the evaluation gates ``[gates]``."""
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            if self.training:
                gates = sample_gates(self.log_alpha, self.stretch, draws=draws, generator=generator)
            else:
                gates = evaluation_gates(self.log_alpha, self.stretch)
            if self.rounds:
                gates = (gates > 0).float() + (gates - gates.detach())  # in this order: the difference is exactly 0
        return gates

    def open_probability(self) -> Tensor:
        """Return P(z > 0) of every gate, ``[gates]``."""
        return open_probability(self.log_alpha, self.stretch)

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}, {self.stretch}, straight_through={self.straight_through}"
