"""Masks that were made elsewhere: ``mask:FILE`` as a method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from gates.budget import Budget
from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.surgery.masks import parse_mask, read_mask
from training.comparison.methods import GIVEN, Method

content_of = cache(read_mask)
"""The content of a mask file as it is when it is first read, so that all seeds have the same mask."""


def given_mask(base: str, gates: HeadGates) -> Tensor:
    """The mask ``[gates]`` of ``mask:FILE``.

    Raises:
        GateError: if the file holds no mask of this model, or one that keeps all heads, none, or some of a group's.
    """
    path = base.removeprefix(GIVEN)
    mask = gates.to_gates(parse_mask(content_of(path), gates.sites, source=path)).cpu()
    if not set(mask.tolist()) <= {0.0, 1.0}:
        gate = int(((mask > 0) & (mask < 1)).nonzero()[0])
        raise GateError(
            f"the mask file {path!r} keeps some query heads of key/value head {gate} and drops others; with --model.unit group "
            "keep or drop them together"
        )
    if mask.sum() in (0, gates.size):
        raise GateError(f"the mask file {path!r} keeps {int(mask.sum())} of {gates.size} {gates.unit}s; give one to compare")
    return mask


def own_budget(base: str, gates: HeadGates, budgets: Sequence[Budget]) -> Budget:
    """The one of several budgets that a given mask just fills: it is compared with what keeps as many heads.

    Raises:
        GateError: if it fills none, or it is no mask of this model.
    """
    mask, kinds = given_mask(base, gates), gates.kind_index().cpu()
    counted = [budget for budget in budgets if budget.time is None]
    if not counted:
        raise GateError(f"{base!r} has its own number of heads, but the budget is a time; compare it at that number")
    for budget in counted:
        if budget.is_met(mask, kinds):
            return budget
    kept: Any = int(mask.sum())
    if any(budget.per_kind for budget in counted):
        places = kinds.unique().tolist()
        kept = {kind: int(mask[kinds == place].sum()) for kind, place in zip(gates.kind_sizes(), places, strict=True)}
    totals = ", ".join(str(budget.total) for budget in counted)
    raise GateError(
        f"{base!r} keeps {kept} of {gates.size} {gates.unit}s and is compared at that alone, but the budgets keep {totals}; "
        f"add {kept} to --budgets (for a run, have it as --model.budget)"
    )


def check_given_masks(methods: Sequence[Method], gates: HeadGates, budgets: Sequence[Budget]) -> None:
    """Raises :class:`GateError` for the first given mask that is not one of this model, or fits no budget."""
    for method in methods:
        if method.is_given:
            own_budget(method.base, gates, budgets)
