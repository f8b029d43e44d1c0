"""The gates of a family by its name."""

from __future__ import annotations

from typing import get_args

from torch import Tensor

from gates.budget import Budget
from gates.errors import GateError
from gates.families.base import LearnedGates
from gates.families.clamped_linear import ClampedLinear
from gates.families.hard_concrete import HardConcrete
from gates.families.relaxed_topk import RelaxedTopK
from gates.families.straight_through import StraightThroughTopK
from gates.options import GateFamily


def learned_gates(family: GateFamily, budget: Budget, kind_index: Tensor, hard_concrete: HardConcrete) -> LearnedGates:
    """Gates of a family, as they are before training.

    Args:
        family: name of the family.
        budget: number of gates that the two top-k families keep; without effect on the others.
        kind_index: kind of each gate as a position in :data:`gates.sites.KINDS`, ``[gates]``.
        hard_concrete: gates of the first family, returned as they are where it is named.

    Raises:
        GateError: for a name that no family has.
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
