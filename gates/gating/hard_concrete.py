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

# What the families of learned gates share: one trainable number per gate, and how far the pruning has come.

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
    return torch.empty(shape, device=like.device).uniform_(NOISE_MARGIN, 1 - NOISE_MARGIN, generator=generator)


def annealed(start: float, end: float, progress: float) -> float:
    """A temperature on its log-linear way: ``start ** (1 - progress) * end ** progress``, progress from 0 to 1."""
    return float(start ** (1 - progress) * end**progress)


class LearnedGates(nn.Module, ABC):
    """A vector of gates with one trainable ``log_alpha`` each: what every family is.

    All families rank heads by ``log_alpha``, higher kept first, and have no other state, so that a checkpoint of one loads
    into another. A call gives float32 gates in [0, 1], also under autocast and for half-precision models.

    Args:
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


@dataclass(frozen=True)
class Stretch:
    """The temperature and the interval (low, high) that a binary Concrete variable is stretched to.

    Args:
        temperature: beta; Voita et al. 2019 use 0.33, Louizos et al. 2018 two thirds.
        low: lower end, below 0.
        high: upper end, above 1.

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
    """Draw gates: reparametrised, so gradients reach ``log_alpha``.

    Args:
        log_alpha: parameters of the gates, ``[gates]``.
        draws: independent draws of all gates; None for one without a dimension of its own.
        generator: source of the noise, on ``log_alpha``'s device; the global one by default.

    Returns:
        Gates in [0, 1], float32, ``[gates]`` or ``[draws, gates]``.
    """
    log_alpha = log_alpha.float()
    uniform = uniform_noise(log_alpha, draws=draws, generator=generator)
    logits = (torch.logit(uniform) + log_alpha) / stretch.temperature
    return _stretch_and_clip(torch.sigmoid(logits), stretch)


def evaluation_gates(log_alpha: Tensor, stretch: Stretch = DEFAULT_STRETCH) -> Tensor:
    """The deterministic gate used in evaluation (Louizos et al. 2018, equation 13), float32.

    With the default stretch it is exactly 0 if and only if ``log_alpha <= -log 11`` and exactly 1 if and only
    if ``log_alpha >= log 11``.
    """
    return _stretch_and_clip(torch.sigmoid(log_alpha.float()), stretch)


def open_probability(log_alpha: Tensor, stretch: Stretch = DEFAULT_STRETCH) -> Tensor:
    """P(z > 0) in closed form; summed over heads it is the expected L0 norm (equation 12)."""
    return torch.sigmoid(log_alpha.float() - stretch.temperature * math.log(-stretch.low / stretch.high))


def _stretch_and_clip(unit: Tensor, stretch: Stretch) -> Tensor:
    return hardtanh(unit * (stretch.high - stretch.low) + stretch.low, 0.0, 1.0)  # clamp has a backward pass of five operations


class HardConcrete(LearnedGates):
    """A vector of Hard-Concrete gates with one trainable ``log_alpha`` each.

    Args:
        gates: number of gates.
        stretch: temperature and stretch interval; the temperature at the start, if it is annealed.
        initial_log_alpha: start of every gate. The default, 2.5, is *near-open*: every evaluation gate is exactly 1, so
            attaching gates does not change a trained model.
        straight_through: whether every gate above 0 is rounded up to 1 in the forward pass, with the gradient of the soft
            gate, so that training sees only the hard values 0 and 1.
        anneal: temperature at ``progress`` 1, reached log-linearly; the lower, the more often training gates are 0 or 1.
            None for a temperature that stays as it is.
        straight_through_from: ``progress`` from which on gates are rounded as by ``straight_through``; 1 for never.

    In ``train()`` mode a call draws fresh gates, in ``eval()`` mode it returns the evaluation gates. All
    arithmetic is float32, also under autocast and for half-precision models.

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
        """Temperature and stretch interval at the present progress."""
        if self.anneal is None:
            return self.first_stretch
        temperature = annealed(self.first_stretch.temperature, self.anneal, self.progress)
        return replace(self.first_stretch, temperature=temperature)

    @property
    def rounds(self) -> bool:
        """Whether gates are rounded at the present progress."""
        return self.straight_through or self.progress >= self.straight_through_from < 1

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Gates ``[gates]``: a draw (or ``[draws, gates]``) in training mode, the evaluation gates otherwise."""
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            if self.training:
                gates = sample_gates(self.log_alpha, self.stretch, draws=draws, generator=generator)
            else:
                gates = evaluation_gates(self.log_alpha, self.stretch)
            if self.rounds:
                gates = (gates > 0).float() + (gates - gates.detach())  # in this order: the difference is exactly 0
        return gates

    def open_probability(self) -> Tensor:
        """P(z > 0) of every gate, ``[gates]``."""
        return open_probability(self.log_alpha, self.stretch)

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}, {self.stretch}, straight_through={self.straight_through}"
