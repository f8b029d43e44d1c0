"""Which options of a run go together: checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gates.errors import GateError
from gates.head_gates import TOP_K_FAMILIES
from gates.search.swaps import LEAST_PASSES

AT_LEAST_0 = (
    "finetune", "prune", "retrain", "minimum_per_layer", "learning_rate", "lr_warm_up", "weight_decay", "gate_learning_rate",
    "multiplier_learning_rate", "his_start", "distil_hidden", "prune_learning_rate",
)  # fmt: skip


LARGEST_SEED = 2**32 - 1
"""That every library takes."""


def mask_found_by(options: Mapping[str, Any]) -> str:
    """How a run with these options finds its mask, and what its weights went through, in one line."""
    if options["prune"] == 0:
        return "no pruning: the dense model, with all its heads"
    family = options.get("gate", "hard-concrete")
    gates = "Hard-Concrete" if family == "hard-concrete" else family
    searched = ", refined by swaps" if options.get("swaps") else ""
    retrained = "weights retrained with the mask" if options["retrain"] > 0 else "weights as they were trained with the gates"
    return f"learned {gates} gates{searched}; {retrained}"


def check_options(options: Mapping[str, Any]) -> None:
    """Check the arguments of :class:`training.pruner.module.HeadPruner`.

    Raises:
        GateError: for a value outside its range, or two that contradict each other.
    """
    check_model(options)
    for name in AT_LEAST_0:
        value = options[name]
        if value is not None and not 0 <= value < math.inf:
            raise GateError(f"{name} is {value}; expected 0 or more")
    swaps, ramp = options["swaps"], options["ramp"]
    if swaps != 0 and not LEAST_PASSES <= swaps < math.inf:
        raise GateError(f"swaps is {swaps}; expected 0 for no search, or at least {LEAST_PASSES} passes, for example 40")
    if options["prune"] == 0 and (options["retrain"] > 0 or options["budget"] is not None or options["finetune"] == 0):
        raise GateError(
            "prune is 0 epochs, but the gates need some training, for example 1; to train a dense model alone, set retrain to 0 "
            "and budget to null too"
        )
    if not 0 < ramp <= 1:
        raise GateError(f"ramp is {ramp}; expected a share of the prune phase above 0 and at most 1")
    check_distillation(options)
    check_gate(options)


def check_model(options: Mapping[str, Any]) -> None:
    """Whether there is one model to start from."""
    backbone, from_scratch = options["backbone"], options["from_scratch"]
    if backbone is None and from_scratch is None:
        raise GateError("there is no model: give a pretrained one (--model.backbone) or config fields (--model.from_scratch)")
    if backbone is not None and from_scratch is not None:
        raise GateError(
            f"both a pretrained model ({backbone!r}) and config fields of a new one are given; add "
            "--model.from_scratch null, or start from a --config without it, such as configs/sst2_minilm_local.yaml"
        )


def check_distillation(options: Mapping[str, Any]) -> None:
    """Whether there is a dense model to learn from, and how."""
    distil, temperature = options["distil"], options["distil_temperature"]
    if not 0 <= distil <= 1:
        raise GateError(f"distil is {distil}; expected a weight from 0 (labels alone) to 1 (the dense model alone)")
    if not 0 < temperature < math.inf:
        raise GateError(f"distil_temperature is {temperature}; expected a number above 0, for example 2")
    if options["from_scratch"] is not None and options["finetune"] == 0 and (distil or options["distil_hidden"]):
        raise GateError(
            "distillation learns from the model at the end of fine-tuning, but finetune is 0 and the model is new; give it a "
            "fine-tuning, or leave out distil and distil_hidden"
        )


def check_gate(options: Mapping[str, Any]) -> None:
    """Whether the gate family can have the options that belong to others."""
    family = options["gate"]
    if family in TOP_K_FAMILIES and options["budget"] is None:
        raise GateError(f"{family} gates need a budget, and it is null; give one, for example --model.budget 0.25")
    if family == "hard-concrete":
        return
    if options["steering"] == "multipliers":
        raise GateError(f"multipliers steer hard-concrete gates, not {family} ones; leave out --model.steering")
    for name, rests_at in (("anneal", None), ("straight_through", False), ("straight_through_from", 1.0)):
        if options[name] != rests_at:
            raise GateError(f"{name} is {options[name]}, but it is of hard-concrete gates, not of {family} ones; leave it out")
