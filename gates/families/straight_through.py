"""Gates that are exactly the top K in the forward pass and a sigmoid in the backward pass.

The straight-through estimator of Bengio, Léonard and Courville (2013), on the top-K mask of movement pruning (Sanh, Wolf and
Rush 2020): a closed gate goes on to receive the gradient that it would have if it were open, and can return. As there, the
number of open gates comes down from all to the budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gates.budget import Budget
from gates.families.relaxed_topk import TopKGates


class StraightThroughTopK(TopKGates):
    """The 0/1 mask of the highest ``log_alpha``, with the gradient of ``sigmoid(log_alpha)``; nothing is drawn.

    Args:
        budget, kind_index: see :class:`gates.families.relaxed_topk.TopKGates`. The budget is reached linearly as
            ``progress`` goes from 0, where all gates are open, to 1.
    """

    def current_budget(self) -> Budget:
        """How many gates are open at the present progress."""
        per_kind = {kind: self._on_the_way(size, self.budget.per_kind[kind]) for kind, size in self.sizes.items()}
        total = sum(per_kind.values()) if per_kind else self._on_the_way(self.log_alpha.numel(), self.budget.total)
        return Budget(total, per_kind)

    def _on_the_way(self, gates: int, count: int) -> int:
        return round(gates - (gates - count) * self.progress)

    def forward(self, generator: torch.Generator | None = None, *, draws: int | None = None) -> Tensor:
        """The mask, in training mode with a gradient; see :class:`gates.families.base.LearnedGates`. All draws are the same."""
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
