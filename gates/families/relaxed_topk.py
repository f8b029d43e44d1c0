"""A relaxed choice of exactly K heads, the gates of Differentiable Subset Pruning (Li, Cotterell and Sachan 2021).

Gumbel noise makes the choice of the K highest weights random (Vieira 2014; Kool et al. 2019), K successive softmaxes whose
sum stands for the chosen set make it differentiable (Xie and Ermon 2019), and a falling temperature makes it hard.

Two things differ from the paper. A sum of softmaxes can exceed 1 for a gate that is chosen twice; here no gate does: what
is above 1 goes to the others. And the paper's last temperature, 1e-8, leaves a gradient of exactly 0 long before the end;
here the temperature stops where gates are nearly hard and still learn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gates.budget import Budget, top_k_mask
from gates.families.base import LearnedGates, annealed, uniform_noise
from gates.sites import KINDS

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
        budget: number of gates to keep, in total or per kind.
        kind_index: kind of each gate as a position in :data:`gates.sites.KINDS`, ``[gates]``.

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
        """Relaxed choices in training mode, the mask otherwise; see :class:`gates.families.base.LearnedGates`."""
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
