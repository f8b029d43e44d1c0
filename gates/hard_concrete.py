"""The Hard-Concrete distribution over gates (Louizos, Welling and Kingma 2018, equations 10 to 12).

A gate ``z`` in [0, 1] is a stretched and clipped binary Concrete variable. It is differentiable in its one
parameter ``log_alpha`` and yet takes the values 0 and 1 exactly with positive probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gates.errors import GateError

NOISE_MARGIN = 1e-6
"""Uniform noise is drawn from [margin, 1 - margin], so that its logit is finite."""

LOG_ALPHA_LIMIT = math.log(100)
"""``|log_alpha|`` is kept below this, so that no gate is lost to a vanishing gradient."""


@dataclass(frozen=True)
class Stretch:
    """The temperature and the interval (low, high) that a binary Concrete variable is stretched to.

    Args:
        temperature: beta; Voita et al. 2019 use 0.33, Louizos et al. 2018 two thirds.
        low: lower end, below 0.
        high: upper end, above 1.
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
        log_alpha: ``[gates]``.
        stretch: temperature and stretch interval.
        draws: independent draws of all gates; None for one without a dimension of its own.
        generator: source of the noise, on ``log_alpha``'s device; the global one by default.

    Returns:
        Gates in [0, 1], float32, ``[gates]`` or ``[draws, gates]``.
    """
    log_alpha = log_alpha.float()
    shape = log_alpha.shape if draws is None else (draws, *log_alpha.shape)
    uniform = torch.rand(shape, generator=generator, device=log_alpha.device)
    uniform = uniform * (1 - 2 * NOISE_MARGIN) + NOISE_MARGIN
    logits = (torch.log(uniform) - torch.log1p(-uniform) + log_alpha) / stretch.temperature
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


def full_probability(log_alpha: Tensor, stretch: Stretch = DEFAULT_STRETCH) -> Tensor:
    """P(z = 1) in closed form: the probability that the stretched variable exceeds 1."""
    threshold = (1 - stretch.low) / (stretch.high - stretch.low)
    return torch.sigmoid(log_alpha.float() - stretch.temperature * math.log(threshold / (1 - threshold)))


def _stretch_and_clip(unit: Tensor, stretch: Stretch) -> Tensor:
    return torch.clamp(unit * (stretch.high - stretch.low) + stretch.low, 0.0, 1.0)


class HardConcrete(nn.Module):
    """A vector of Hard-Concrete gates with one trainable ``log_alpha`` each.

    Args:
        gates: how many.
        stretch: temperature and stretch interval.
        initial_log_alpha: the default, 2.5, is *near-open*: every evaluation gate is exactly 1, so attaching
            gates does not change a trained model.
        straight_through: round every gate that is above 0 up to 1 in the forward pass and keep the gradient of
            the soft gate, so that training sees only the hard values 0 and 1.

    In ``train()`` mode a call draws fresh gates, in ``eval()`` mode it returns the evaluation gates. All
    arithmetic is float32, also under autocast and for half-precision models.
    """

    def __init__(
        self,
        gates: int,
        *,
        stretch: Stretch = DEFAULT_STRETCH,
        initial_log_alpha: float = 2.5,
        straight_through: bool = False,
    ) -> None:
        super().__init__()
        self.stretch = stretch
        self.straight_through = straight_through
        self.log_alpha = nn.Parameter(torch.full((gates,), float(initial_log_alpha)))
        self.clamp_()

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Gates ``[gates]``: a draw (or ``[draws, gates]``) in training mode, the evaluation gates otherwise."""
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            if self.training:
                gates = sample_gates(self.log_alpha, self.stretch, draws=draws, generator=generator)
            else:
                gates = evaluation_gates(self.log_alpha, self.stretch)
            if self.straight_through:
                gates = (gates > 0).float() + gates - gates.detach()
        return gates

    def open_probability(self) -> Tensor:
        """P(z > 0) of every gate, ``[gates]``."""
        return open_probability(self.log_alpha, self.stretch)

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring ``log_alpha`` back into its limits; call it after every optimiser step."""
        self.log_alpha.clamp_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}, {self.stretch}, straight_through={self.straight_through}"
