"""How trained gates come to a budget: what holds them to their schedule after every optimiser step, and the mask they leave.

Whoever trains calls :meth:`BudgetSteering.hold_` after each step of the optimiser and takes :meth:`BudgetSteering.mask` at the
end: a plain loop through :meth:`gates.model.GatedModel.step_`, Hugging Face's Trainer, or another framework's module.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gates.budget import Budget
from gates.errors import GateError
from gates.families.hard_concrete import DEFAULT_STRETCH, HardConcrete
from gates.head_gates import HeadGates
from gates.objective import TargetBudget, project_to_budget
from gates.scores.importance import normalise_by_layer
from gates.sites import KINDS


class BudgetSteering:
    """Leads the gates of a model to a budget. It changes ``log_alpha`` in place.

    Hard-Concrete gates are held by projection: after every step all ``log_alpha`` are shifted by one number, so that the
    expected number of open gates is exactly on its way, and the task loss alone decides which gates these are. Gates of other
    families are only kept within their limits: the two top-k families keep their budget by themselves, and
    ``clamped-linear`` ones pay a price.

    Args:
        gates: gates of a model, as their family starts them.
        budget: gates to keep: a count, a fraction or one of these per kind, see :class:`gates.budget.Budget`.
        minimum_per_layer: gates that every layer keeps in the final mask.
        ramp: share of the pruning after which the schedule has arrived at the budget; then the choice settles.
        start: open fraction from which the schedule sets out; None for that of the gates now, where a projection holds them
            (it cannot reach an expectation of all heads: the limits would level the gates there), and for 1 elsewhere.

    Attributes:
        target: the schedule, with the multipliers of those who steer by them.

    Raises:
        GateError: for a budget that the model cannot have, or a minimum that does not fit into it.
    """

    def __init__(
        self,
        gates: HeadGates,
        budget: int | float | Mapping[str, int | float],
        *,
        minimum_per_layer: int = 0,
        ramp: float = 1.0,
        start: float | None = None,
    ) -> None:
        self.gates, self.minimum_per_layer, self.ramp = gates, minimum_per_layer, ramp
        self.budget = Budget.parse(budget, gates.kind_sizes())
        learned = gates.learned
        stretch = learned.first_stretch if isinstance(learned, HardConcrete) else DEFAULT_STRETCH
        if start is None:
            start = float(learned.open_probability().detach().mean()) if self.projects else 1.0
        self.target = TargetBudget(self.budget, gates.kind_sizes(), stretch, start=start)
        self.mask()  # raises where the minimum does not fit

    @property
    def projects(self) -> bool:
        """Whether gates are shifted after every step."""
        return isinstance(self.gates.learned, HardConcrete)

    def goals(self, ramp: float) -> list[float]:
        """Expected open gates that the schedule asks for, in all or of each budgeted kind.

        Args:
            ramp: how far the schedule has gone, 0 to 1.
        """
        return (self.target.target(ramp) * self.target.heads).tolist()

    def step_(self, progress: float) -> None:
        """After an optimiser step, bring the gates to where they are to be; nothing happens once their mask is fixed.

        The two top-k families change on their way: bring them to its beginning with ``step_(0)`` before the loop.

        Args:
            progress: share of the pruning that is done, 0 to 1.

        Raises:
            GateError: for a progress outside 0 to 1.
        """
        if not 0 <= progress <= 1:
            raise GateError(f"progress is {progress}; expected the share of the pruning that is done, from 0 to 1")
        if self.gates.mode != "masked":
            done = ramped(progress, self.ramp)
            self.hold_(done)
            self.gates.learned.progress = done

    @torch.no_grad()
    def hold_(self, ramp: float) -> None:
        """After an optimiser step, hold the gates to their schedule; at a ramp of 0 only to their limits.

        Args:
            ramp: how far the schedule has gone, 0 to 1.
        """
        learned = self.gates.learned
        learned.clamp_()
        if not isinstance(learned, HardConcrete) or ramp == 0:
            return
        log_alpha, kinds = self.gates.log_alpha, self.gates.kind_index()
        quotas: list[str | None] = [*self.target.kinds] or [None]
        for kind, expected in zip(quotas, self.goals(ramp), strict=True):
            among = torch.ones_like(kinds, dtype=torch.bool) if kind is None else kinds == KINDS.index(kind)
            log_alpha[among] = project_to_budget(log_alpha[among], expected, learned.stretch)

    def mask(self) -> Tensor:
        """What ``log_alpha`` says now: the 0/1 mask ``[gates]`` of exactly the budget, with the minimum per layer."""
        return self.gates.mask_of(self.gates.log_alpha.detach(), self.budget, minimum_per_layer=self.minimum_per_layer)


def ramped(done: float, length: float) -> float:
    """How far a ramp has gone, 0 to 1.

    Args:
        done: what has been done since it began, in steps or as a share of them.
        length: when it has reached its end, in the same unit.
    """
    return min(1.0, done / length) if length > 0 else 1.0


@torch.no_grad()
def set_apart_(gates: HeadGates, his: Tensor, spread: float) -> None:
    """Let the gates start apart from each other, by the logarithm of a head's importance.

    Args:
        gates: gates of a model, as their family starts them.
        his: raw importance of each gate, ``[gates]``, at least 0; see :class:`gates.scores.importance.HeadImportance`.
        spread: units of ``log_alpha`` for each standard deviation of the logarithm.

    Raises:
        GateError: for another number of scores than gates.
    """
    if his.shape != gates.mask.shape:
        raise GateError(f"the scores have shape {list(his.shape)}; expected one for each of {gates.size} {gates.unit}s")
    logarithm = normalise_by_layer(his, gates.layer_index().to(his.device)).clamp(min=1e-6).log()
    standard = (logarithm - logarithm.mean()) / logarithm.std().clamp(min=1e-6)
    gates.log_alpha.add_(spread * standard.to(gates.log_alpha))
    gates.learned.clamp_()
