"""Which parameters an optimiser moves, and how: groups of the backbone and of the gates, and those that rest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from gates.errors import GateError
from gates.head_gates import HeadGates
from gates.objective import TargetBudget

NO_DECAY = re.compile(r"bias$|norm\d*\.weight$|layer_?norm", re.IGNORECASE)


def backbone_groups(backbone: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups of the backbone's trainable parameters: matrices decay, biases and norms do not."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.dim() < 2 or NO_DECAY.search(name) else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"name": "backbone", "params": decayed, "lr": learning_rate, "weight_decay": weight_decay},
        {"name": "backbone-no-decay", "params": plain, "lr": learning_rate, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def gate_groups(
    gates: HeadGates, target: TargetBudget | None, *, learning_rate: float, multiplier_learning_rate: float
) -> list[dict[str, Any]]:
    """Optimiser groups of log_alpha and of a target's multipliers, which ascend; neither decays."""
    groups: list[dict[str, Any]] = [{"name": "gates", "params": [gates.log_alpha], "lr": learning_rate, "weight_decay": 0.0}]
    if target is not None:
        multipliers = {"params": list(target.parameters()), "lr": multiplier_learning_rate, "maximize": True}
        groups.append({"name": "multipliers", "weight_decay": 0.0, **multipliers})
    return groups


def matching_parameters(model: nn.Module, patterns: Iterable[str]) -> list[nn.Parameter]:
    """The parameters whose name one of the regular expressions matches.

    Raises:
        GateError: for a pattern that is no regular expression or matches nothing.
    """
    found: list[nn.Parameter] = []
    for pattern in patterns:
        try:
            matches = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        except re.error as error:
            raise GateError(f"the freeze pattern {pattern!r} is not a regular expression: {error}") from error
        if not matches:
            raise GateError(f"the freeze pattern {pattern!r} matches no parameter of {type(model).__name__}")
        found += matches
    return found
