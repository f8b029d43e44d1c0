"""Which parameters an optimiser moves, and how: groups of the backbone and of the gates, and those that rest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from gates.errors import GateError
from gates.head_gates import HeadGates
from training.config import PrunerOptions
from training.config.model import FREEZING
from training.pruner.activations import checkpoint_activations_, checkpoints_activations

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


def parameter_groups(backbone: nn.Module, gates: HeadGates, options: PrunerOptions) -> list[dict[str, Any]]:
    """All groups of a run's optimiser: those of the backbone, and the gates, which do not decay.

    Args:
        backbone: with its frozen parameters not requiring gradients.
        gates: on the backbone.
        options: of the run, for the learning rates.
    """
    of_gates = {"name": "gates", "params": [gates.log_alpha], "lr": options.gate_learning_rate, "weight_decay": 0.0}
    return [*backbone_groups(backbone, options.learning_rate, options.weight_decay), of_gates]


def is_of_gates(group: Mapping[str, Any]) -> bool:
    """Whether a group is of the gates, which rest outside the prune phase."""
    return bool(group["name"] == "gates")


def learning_rate_of(group: Mapping[str, Any], options: PrunerOptions) -> float:
    """The learning rate that the options give a group."""
    return options.gate_learning_rate if is_of_gates(group) else options.learning_rate


def use_rates_(groups: Sequence[dict[str, Any]], scheduler: LambdaLR, rates: Sequence[float], *, step: int) -> None:
    """Give an optimiser's groups other learning rates than the checkpoint that they come from, one for each, from a step on."""
    scheduler.base_lrs = list(rates)
    for group, rate, factor in zip(groups, rates, scheduler.lr_lambdas, strict=True):
        group["initial_lr"], group["lr"] = rate, rate * factor(step)


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
            example = next(name for name, _ in model.named_parameters())
            raise GateError(
                f"the freeze pattern {pattern!r} matches no parameter of {type(model).__name__}; one is {example!r}"
            )
        found += matches
    return found


def fix_(backbone: nn.Module, options: PrunerOptions) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Fix what the options fix of a backbone from the beginning.

    Returns:
        What is fixed, by the model itself too, as sinusoids are; and what is to be from the end of fine-tuning on.

    Raises:
        GateError: as :func:`matching_parameters` and :func:`check_some_train` do.
    """
    for parameter in matching_parameters(backbone, options.freeze or []):
        parameter.requires_grad_(False)
    fixed_later = matching_parameters(backbone, options.freeze_while_pruning or [])
    check_some_train(backbone, fixed_later, options)
    return [p for p in backbone.parameters() if not p.requires_grad], fixed_later


def check_some_train(backbone: nn.Module, fixed_later: Iterable[nn.Parameter], options: PrunerOptions) -> None:
    """Raises :class:`GateError` where patterns leave no parameter to train and do not say so as ``.*``, by which everything
    else knows that nothing trains.

    Args:
        backbone: with what is fixed from the beginning.
        fixed_later: what is fixed from the end of fine-tuning on.
        options: with the patterns.
    """
    resting = {id(parameter) for parameter in fixed_later}
    given = [name for name in FREEZING if getattr(options, name)]
    if not given or options.nothing_trains or any(p.requires_grad and id(p) not in resting for p in backbone.parameters()):
        return
    patterns = " and ".join(f"{name} {getattr(options, name)}" for name in given)
    raise GateError(
        f"every parameter of {type(backbone).__name__} is fixed by {patterns}; give --model.{given[-1]} '[\".*\"]' where gates "
        "alone are to be learned from then on, or leave some parameters out"
    )


def rest_(backbone: PreTrainedModel, rests: bool, frozen: Iterable[nn.Parameter], *, alone: bool) -> None:
    """Let a backbone rest while gates are learned, or wake it: at rest it has no dropout, which would only blur what gates are
    told, and on one process no gradients of its own, which cost a third of a step. (DDP waits for every gradient that it has
    been promised.)

    Args:
        backbone: in training or at rest.
        rests: what it is to do from now on.
        frozen: its parameters that never have gradients.
        alone: whether this is the only process.
    """
    if backbone.training != rests:
        return
    backbone.train(not rests)
    if checkpoints_activations(backbone):
        checkpoint_activations_(backbone, rests=rests)
    if alone:
        for parameter in backbone.parameters():
            parameter.requires_grad_(not rests)
        for parameter in frozen:
            parameter.requires_grad_(False)
