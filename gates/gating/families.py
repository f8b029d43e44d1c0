"""Families of learned gates besides Hard-Concrete, and the gates of a family by its name."""

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
# Gumbel noise makes the choice of the K highest weights random (Vieira 2014; Kool et al. 2019). K successive softmaxes, whose
# sum represents the chosen set, make it differentiable (Xie and Ermon 2019). A falling temperature makes it hard.
#
# Two things differ from the paper. A sum of softmaxes can exceed 1 for a gate that is chosen twice; here the excess goes to the
# other gates. And the paper's last temperature, 1e-8, leaves a gradient of exactly 0 long before the end; here the temperature
# stops where gates are nearly hard and still learn.


def relaxed_top_k(scores: Tensor, count: int, temperature: float) -> Tensor:
    """Return a relaxation of the 0/1 mask of the K highest scores: the sum of K successive softmaxes.

    Each softmax lowers the scores of its choice by ``log(1 - chosen)`` before the next (Xie and Ermon 2019). Then any excess
    over 1 is distributed to the other gates in proportion to their room.

    Args:
        scores: The scores, ``[..., gates]``, with noise for a random choice.
        count: The number K, from 0 to the number of gates.
        temperature: The temperature, above 0. The limit 0 is the hard mask.

    Returns:
        ``[..., gates]``, float64, each in [0, 1]. The last dimension sums to K.
    """
    logits = scores.double()
    if count in (0, scores.shape[-1]):
        return logits * 0 + float(count > 0)
    total = torch.zeros_like(logits)
    for _ in range(count):
        chosen = torch.softmax(logits / temperature, dim=-1)
        total = total + chosen
        logits = logits + torch.log((1 - chosen).clamp_min(1e-30))
    clipped = total.clamp_max(1.0)
    excess, room = total - clipped, 1 - clipped
    # The sum of the room is at least 1, since count is below the number of gates, and at least the excess.
    return clipped + room * (excess.sum(-1, keepdim=True) / room.sum(-1, keepdim=True))


class TopKGates(LearnedGates):
    """Gates with a fixed number of open ones, in the whole model or among the heads of each kind.

    In ``eval()`` mode a call returns the 0/1 mask of the highest ``log_alpha`` within :meth:`current_budget`.

    Args:
        kind_index: The position of each gate's kind in :data:`gates.attention.sites.KINDS`, ``[gates]``.
    """

    kind_index: Tensor

    def __init__(self, budget: Budget, kind_index: Tensor) -> None:
        super().__init__(kind_index.numel(), initial_log_alpha=0.0)
        self.budget = budget
        self.register_buffer("kind_index", kind_index.clone(), persistent=False)
        self.sizes = {kind: int((kind_index == KINDS.index(kind)).sum()) for kind in budget.per_kind}

    def current_budget(self) -> Budget:
        """Return the number of open gates at the present progress."""
        return self.budget

    def mask(self) -> Tensor:
        """Return the 0/1 mask ``[gates]`` of the highest ``log_alpha``."""
        return top_k_mask(self.log_alpha.detach(), self.current_budget(), self.kind_index)

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}, budget={self.budget}"


class RelaxedTopK(TopKGates):
    """A relaxed random choice of exactly the budgeted number of heads, whose temperature falls with ``progress``."""

    start_temperature = 10.0  # large compared with the noise, so that all gates of a budget are nearly equal
    end_temperature = 0.1  # small compared with the differences of the noise, which are of order 1: gates are nearly hard

    @property
    def temperature(self) -> float:
        return annealed(self.start_temperature, self.end_temperature, self.progress)

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Return relaxed choices in training mode, else the mask; see :class:`gates.gating.hard_concrete.LearnedGates`."""
        if not self.training:
            return self.mask()
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            gumbel = -torch.log(-torch.log(uniform_noise(self.log_alpha, draws=draws, generator=generator)))
            return self._relaxed(self.log_alpha.float() + gumbel)

    def open_probability(self) -> Tensor:
        """Return the relaxed choice without noise, ``[gates]``. Its sum is the budget, so a price on it has no effect."""
        return self._relaxed(self.log_alpha.float())

    def _relaxed(self, scores: Tensor) -> Tensor:
        """Relax the choice among scores ``[..., gates]`` within each budgeted kind, in float32."""
        relaxed = torch.zeros_like(scores)
        for index, count in self._quotas():
            part = relaxed_top_k(scores[..., index], count, self.temperature)
            relaxed = relaxed.index_copy(-1, index, part.to(relaxed.dtype))
        return relaxed

    def _quotas(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the indices of the gates that share a budget, and the number of those that stay."""
        if not self.budget.per_kind:
            yield torch.arange(self.log_alpha.numel(), device=self.log_alpha.device), self.budget.total
        for kind, count in self.budget.per_kind.items():
            yield (self.kind_index == KINDS.index(kind)).nonzero().flatten(), count


# Gates that are exactly the top K in the forward pass and a sigmoid in the backward pass.
#
# This is the straight-through estimator of Bengio, Léonard and Courville (2013), on the top-K mask of movement pruning (Sanh,
# Wolf and Rush 2020). A closed gate still receives the gradient that it would have if it were open, and can return. As in
# movement pruning, the number of open gates falls from all to the budget.


class StraightThroughTopK(TopKGates):
    """The 0/1 mask of the highest ``log_alpha``, with the gradient of ``sigmoid(log_alpha)`` and without noise.

    The number of open gates falls linearly with ``progress``, from all at 0 to the budget at 1.
    """

    def current_budget(self) -> Budget:
        """Return the number of open gates at the present progress."""
        per_kind = {kind: self._on_the_way(size, self.budget.per_kind[kind]) for kind, size in self.sizes.items()}
        total = sum(per_kind.values()) if per_kind else self._on_the_way(self.log_alpha.numel(), self.budget.total)
        return Budget(total, per_kind)

    def _on_the_way(self, gates: int, count: int) -> int:
        return round(gates - (gates - count) * self.progress)

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Return the mask, in training mode with a gradient; see :class:`LearnedGates`. All draws are the same."""
        mask = self.mask()
        if not self.training:
            return mask
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            soft = torch.sigmoid(self.log_alpha.float())
            gates = mask + (soft - soft.detach())  # in this order: the difference is exactly 0
        return gates if draws is None else gates.expand(draws, -1)

    def open_probability(self) -> Tensor:
        """Return the mask, ``[gates]``. Its sum is fixed, so a price on it has no effect."""
        return self.mask()


# Gates that are plain numbers clamped to [0, 1], closed by an L1 price: the gates of DuoAttention (Xiao et al. 2024).
#
# DuoAttention clips the numbers at both ends. Then all closed heads are equal, and a budget has to break ties among them. Here
# a number beyond an end still moves by tiny steps, which do not change the gate. So closed heads rank by the time of their
# closing, and open heads by the time since they reached 1.

MEMORY = 1e-4
"""The largest step of a number beyond an end. It is small, so that the number can return soon."""


def clamped(log_alpha: Tensor) -> Tensor:
    """Clamp ``log_alpha`` to [0, 1], with the gradient of ``log_alpha`` itself, so that a closed gate can open again."""
    passed = log_alpha - log_alpha.detach()  # exactly 0
    return log_alpha.detach().clamp(0.0, 1.0) + passed


def slowed(before: Tensor, after: Tensor) -> Tensor:
    """Return ``after`` with a shorter step from ``before`` where it leads out of [0, 1], or further out.

    The outer part of the step shrinks from o to ``m * o / (o + m)`` with m :data:`MEMORY`. It is below m, and greater for a
    greater push.
    """
    low, high = before.clamp_max(0.0), before.clamp_min(1.0)
    down, up = (low - after).clamp_min(0.0), (after - high).clamp_min(0.0)
    return after.clamp(low, high) + MEMORY * (up / (up + MEMORY) - down / (down + MEMORY))


class ClampedLinear(LearnedGates):
    """Gates ``clamp(log_alpha, 0, 1)``, fully open at the start and without noise; ``log_alpha`` is no logarithm here."""

    def __init__(self, gates: int) -> None:
        super().__init__(gates, initial_log_alpha=1.0)
        self._before: Tensor | None = None  # log_alpha before the optimiser's step

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """Return the gates, equal in training, evaluation and all draws; see :class:`LearnedGates`."""
        with torch.autocast(self.log_alpha.device.type, enabled=False):
            gates = clamped(self.log_alpha.float())
        if not self.training:
            return gates
        self._before = self.log_alpha.detach().clone()
        return gates if draws is None else gates.expand(draws, -1)

    def open_probability(self) -> Tensor:
        """Return the gates themselves, ``[gates]``. Their sum times a price is the L1 penalty."""
        return clamped(self.log_alpha.float())

    @torch.no_grad()
    def clamp_(self) -> None:
        """Reduce the last optimiser step outside [0, 1]; call it after every optimiser step."""
        if self._before is not None:
            self.log_alpha.copy_(slowed(self._before, self.log_alpha))
            self._before = None

    def extra_repr(self) -> str:
        return f"gates={self.log_alpha.numel()}"


def learned_gates(family: GateFamily, budget: Budget, kind_index: Tensor, hard_concrete: HardConcrete) -> LearnedGates:
    """Return the untrained gates of a family.

    Args:
        budget: The number of gates that the two top-k families keep.
        kind_index: The position of each gate's kind in :data:`gates.attention.sites.KINDS`, ``[gates]``.
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
