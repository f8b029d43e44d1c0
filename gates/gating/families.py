"""The gates of a family by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from gates.attention.sites import KINDS
from gates.errors import GateError
from gates.gating.budget import Budget, top_k_mask
from gates.gating.hard_concrete import HardConcrete, LearnedGates, annealed, uniform_noise
from gates.options import GateFamily

# A relaxed choice of exactly K heads, the gates of Differentiable Subset Pruning (Li, Cotterell and Sachan 2021).
#
# Gumbel noise makes the choice of the K highest weights random (Vieira 2014; Kool et al. 2019), K successive softmaxes whose
# sum stands for the chosen set make it differentiable (Xie and Ermon 2019), and a falling temperature makes it hard.
#
# Two things differ from the paper. A sum of softmaxes can exceed 1 for a gate that is chosen twice; here no gate does: what
# is above 1 goes to the others. And the paper's last temperature, 1e-8, leaves a gradient of exactly 0 long before the end;
# here the temperature stops where gates are nearly hard and still learn.

START_TEMPERATURE = 10.0
"""Large beside the noise, so that all gates of a budget are nearly equal."""

END_TEMPERATURE = 0.1
"""Small beside the noise, whose differences are of order 1, so that gates are nearly hard."""

SMALLEST = 1e-30
"""What is left of the chance of a gate that has been chosen for certain."""


def relaxed_top_k(scores: Tensor, count: int, temperature: float) -> Tensor:
    """K successive softmaxes, summed: a relaxation of the 0/1 mask of the K highest scores.

    Each softmax lowers the scores of what it chose by ``log(1 - chosen)`` before the next (Xie and Ermon 2019). Then what
    exceeds 1 is handed to the other gates in proportion to the room they have.

    Args:
        scores: scores ``[..., gates]``, with noise for a random choice.
        count: K, from 0 to the number of gates.
        temperature: temperature above 0; the limit 0 is the hard mask.

    Returns:
        ``[..., gates]``, float64, each in [0, 1]; the last dimension sums to K.
    """
    logits = scores.double()
    if count in (0, scores.shape[-1]):
        return logits * 0 + float(count > 0)
    total = torch.zeros_like(logits)
    for _ in range(count):
        chosen = torch.softmax(logits / temperature, dim=-1)
        total = total + chosen
        logits = logits + torch.log((1 - chosen).clamp_min(SMALLEST))
    clipped = total.clamp_max(1.0)
    excess, room = total - clipped, 1 - clipped
    # The room of all gates together is at least 1, since count is below their number, and no less than the excess.
    return clipped + room * (excess.sum(-1, keepdim=True) / room.sum(-1, keepdim=True))


class TopKGates(LearnedGates):
    """Gates of which a fixed number is open, in the whole model or among the heads of each kind.

    Args:
        kind_index: kind of each gate as a position in :data:`gates.attention.sites.KINDS`, ``[gates]``.

    In ``eval()`` mode a call gives the 0/1 mask of the highest ``log_alpha`` that :meth:`current_budget` allows.
    """

    kind_index: Tensor

    def __init__(self, budget: Budget, kind_index: Tensor) -> None:
        super().__init__(kind_index.numel(), initial_log_alpha=0.0)
        self.budget = budget
        self.register_buffer("kind_index", kind_index.clone(), persistent=False)
        self.sizes = {kind: int((kind_index == KINDS.index(kind)).sum()) for kind in budget.per_kind}

    def current_budget(self) -> Budget:
        """How many gates are open at the present progress."""
        return self.budget

    def mask(self) -> Tensor:
        """The 0/1 mask ``[gates]`` of the highest ``log_alpha``."""
        return top_k_mask(self.log_alpha.detach(), self.current_budget(), self.kind_index)

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}, budget={self.budget}"


class RelaxedTopK(TopKGates):
    """Gates that are a relaxed random choice of exactly the budgeted number of heads; the temperature falls with ``progress``.

    Args:
        budget, kind_index: see :class:`TopKGates`.
        start_temperature: temperature at progress 0.
        end_temperature: temperature at progress 1; it is reached log-linearly.
    """

    def __init__(
        self,
        budget: Budget,
        kind_index: Tensor,
        *,
        start_temperature: float = START_TEMPERATURE,
        end_temperature: float = END_TEMPERATURE,
    ) -> None:
        super().__init__(budget, kind_index)
        self.start_temperature, self.end_temperature = start_temperature, end_temperature

    @property
    def temperature(self) -> float:
        return annealed(self.start_temperature, self.end_temperature, self.progress)

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Relaxed choices in training mode, the mask otherwise; see :class:`gates.gating.hard_concrete.LearnedGates`."""
        if not self.training:
            return self.mask()
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            gumbel = -torch.log(-torch.log(uniform_noise(self.log_alpha, draws=draws, generator=generator)))
            return self._relaxed(self.log_alpha.float() + gumbel)

    def open_probability(self) -> Tensor:
        """The relaxed choice without noise, ``[gates]``; its sum is the budget, so that a price on it changes nothing."""
        return self._relaxed(self.log_alpha)

    def _relaxed(self, scores: Tensor) -> Tensor:
        """``[..., gates]`` in float32, each budgeted kind by itself."""
        relaxed = torch.zeros_like(scores)
        for index, count in self._quotas():
            part = relaxed_top_k(scores[..., index], count, self.temperature)
            relaxed = relaxed.index_copy(-1, index, part.to(relaxed.dtype))
        return relaxed

    def _quotas(self) -> Iterator[tuple[Tensor, int]]:
        """Gates that share a budget, and how many of them stay."""
        if not self.budget.per_kind:
            yield torch.arange(self.log_alpha.numel(), device=self.log_alpha.device), self.budget.total
        for kind, count in self.budget.per_kind.items():
            yield (self.kind_index == KINDS.index(kind)).nonzero().flatten(), count


# Gates that are exactly the top K in the forward pass and a sigmoid in the backward pass.
#
# The straight-through estimator of Bengio, Léonard and Courville (2013), on the top-K mask of movement pruning (Sanh, Wolf and
# Rush 2020): a closed gate goes on to receive the gradient that it would have if it were open, and can return. As there, the
# number of open gates comes down from all to the budget.


class StraightThroughTopK(TopKGates):
    """The 0/1 mask of the highest ``log_alpha``, with the gradient of ``sigmoid(log_alpha)``; nothing is drawn. The budget is
    reached linearly as ``progress`` goes from 0, where all gates are open, to 1."""

    def current_budget(self) -> Budget:
        """How many gates are open at the present progress."""
        per_kind = {kind: self._on_the_way(size, self.budget.per_kind[kind]) for kind, size in self.sizes.items()}
        total = sum(per_kind.values()) if per_kind else self._on_the_way(self.log_alpha.numel(), self.budget.total)
        return Budget(total, per_kind)

    def _on_the_way(self, gates: int, count: int) -> int:
        return round(gates - (gates - count) * self.progress)

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """The mask, in training mode with a gradient; see :class:`LearnedGates`. All draws are the same."""
        mask = self.mask()
        if not self.training:
            return mask
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            soft = torch.sigmoid(self.log_alpha.float())
            gates = mask + (soft - soft.detach())  # in this order: the difference is exactly 0
        return gates if draws is None else gates.expand(draws, -1)

    def open_probability(self) -> Tensor:
        """The mask, ``[gates]``: nothing is random, and its sum is given, so that a price on it changes nothing."""
        return self.mask()


# Gates that are plain numbers clamped to [0, 1], closed by an L1 price: the gates of DuoAttention (Xiao et al. 2024).
#
# There the numbers are clipped at both ends, so that all heads that closed are equal, and a budget other than what the price
# leaves has to break ties. Here a number that is pushed beyond an end goes on by tiny steps, which no gate shows: closed heads
# rank by when they closed, and those that want to be more than open by how long they have.

MEMORY = 1e-4
"""How far a number beyond an end goes on in one optimiser step at most: little, so that it can soon come back."""


def clamped(log_alpha: Tensor) -> Tensor:
    """``log_alpha`` clamped to [0, 1], with the gradient of ``log_alpha`` itself, so that a closed gate can open again."""
    passed = log_alpha - log_alpha.detach()  # exactly 0
    return log_alpha.detach().clamp(0.0, 1.0) + passed


def slowed(before: Tensor, after: Tensor) -> Tensor:
    """What an optimiser step from ``before`` to ``after`` comes to where it leads out of [0, 1], or further out.

    The part beyond the end, or beyond ``before`` if that was outside, shrinks from o to ``m * o / (o + m)`` with m
    :data:`MEMORY`: below m, and greater for a greater push.
    """
    low, high = before.clamp_max(0.0), before.clamp_min(1.0)
    down, up = (low - after).clamp_min(0.0), (after - high).clamp_min(0.0)
    return after.clamp(low, high) + MEMORY * (up / (up + MEMORY) - down / (down + MEMORY))


class ClampedLinear(LearnedGates):
    """Gates ``clamp(log_alpha, 0, 1)``, fully open at the start; nothing is drawn, and ``log_alpha`` is no logarithm here."""

    def __init__(self, gates: int) -> None:
        super().__init__(gates, initial_log_alpha=1.0)
        self._before: Tensor | None = None  # log_alpha when gates were last used in training, so before the optimiser's step

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """The gates, the same in training, evaluation and all draws; see :class:`gates.gating.hard_concrete.LearnedGates`."""
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            gates = clamped(self.log_alpha.float())
        if not self.training:
            return gates
        self._before = self.log_alpha.detach().clone()
        return gates if draws is None else gates.expand(draws, -1)

    def open_probability(self) -> Tensor:
        """The gates themselves, ``[gates]``: their sum, priced, is the L1 penalty."""
        return clamped(self.log_alpha.float())

    @torch.no_grad()
    def clamp_(self) -> None:
        """Slow down what left [0, 1] since gates were last used in training; call it after every optimiser step."""
        if self._before is not None:
            self.log_alpha.copy_(slowed(self._before, self.log_alpha))
            self._before = None

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}"


def learned_gates(family: GateFamily, budget: Budget, kind_index: Tensor, hard_concrete: HardConcrete) -> LearnedGates:
    """Gates of a family, as they are before training.

    Args:
        budget: number of gates that the two top-k families keep; without effect on the others.
        kind_index: kind of each gate as a position in :data:`gates.attention.sites.KINDS`, ``[gates]``.
        hard_concrete: gates of the first family, returned as they are where it is named.
    """
    match family:
        case "hard-concrete":
            return hard_concrete
        case "relaxed-top-k":
            return RelaxedTopK(budget, kind_index)
        case "straight-through-top-k":
            return StraightThroughTopK(budget, kind_index)
        case "clamped-linear":
            return ClampedLinear(len(kind_index))
    raise GateError(f"the gate family is {family!r}; expected one of {', '.join(get_args(GateFamily))}")
