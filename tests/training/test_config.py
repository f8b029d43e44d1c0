"""Options check themselves: what cannot be is named before anything is loaded."""

import math
from dataclasses import MISSING, FrozenInstanceError, asdict, fields, replace
from typing import get_args, get_type_hints

import pytest

from gates.errors import GateError
from training.cli.command_line import COMPARISON_GROUPS, GROUPS
from training.config import EndOfRun, PrunerOptions, RunOptions, ScratchTraining, Source, WeightsKept
from training.config.checks import check_values
from training.config.data import ParallelText, Synthetic, Text
from training.config.model import Distillation, Gating, Optimisation, Phases
from training.config.run import LARGEST_SEED, TrainerOptions
from training.pruner.module import HeadPruner

NEW = {"from_scratch": {"model_type": "bert"}}
BAD = [
    (Source, {}, "there is no model"),
    (Source, {**NEW, "backbone": "also"}, "both a pretrained model .'also'."),
    (Gating, {"minimum_per_layer": -1}, "minimum_per_layer is -1; expected at least 0"),
    (Gating, {"init_spread": -1.0}, "init_spread is -1.0"),
    (Gating, {"gate": "relaxed-top-k", "budget": None}, "relaxed-top-k gates need a budget"),
    (
        Gating,
        {"gate": "straight-through-top-k", "anneal": 0.1},
        "anneal is 0.1, but straight-through-top-k gates do not use it",
    ),
    (Gating, {"gate": "clamped-linear", "straight_through": True}, "straight_through is True, but clamped-linear gates"),
    (Phases, {"finetune": -1.0}, "finetune is -1"),
    (Phases, {"ramp": 1.1}, "ramp is 1.1; expected a share of the prune phase above 0 and at most 1"),
    (Phases, {"swaps": 5}, "swaps is 5; expected 0 for no search, or at least 6 passes"),
    (Optimisation, {"lr_warm_up": 3.0}, "lr_warm_up is 3.0; expected a number from 0 to 1"),
    (Gating, {"temperature": 0.0}, "temperature is 0.0; expected a number above 0"),
    (Gating, {"anneal": -1.0}, "anneal is -1.0; expected a number above 0"),
    (Optimisation, {"weight_decay": -1.0}, "weight_decay is -1.0"),
    (Distillation, {"distil": 1.5}, "distil is 1.5; expected a weight from 0"),
    (Distillation, {"distil_temperature": 0.0}, "distil_temperature is 0.0"),
    (Distillation, {"distil_hidden": -1.0}, "distil_hidden is -1.0"),
]
"""What no group of the module's options takes. The module's options are all of these groups at once."""


@pytest.mark.parametrize(("group", "settings", "message"), BAD)
def test_options_that_do_not_fit_are_named_by_their_group_and_by_all_together(group, settings, message):
    with pytest.raises(GateError, match=message):
        group(**settings)
    with pytest.raises(GateError, match=message):
        PrunerOptions(**(NEW | settings if settings else {}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prune": 0.0}, "prune is 0"),
        ({"prune": 0.0, "retrain": 0.0, "budget": None, "finetune": 0.0}, "prune is 0"),
        ({"distil": 0.5, "finetune": 0.0}, "finetune is 0 and the model is new"),
    ],
)
def test_groups_that_do_not_fit_together(settings, message):
    with pytest.raises(GateError, match=message):
        PrunerOptions(**(NEW | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"from_scratch": None, "backbone": "a/model", "finetune": 0.0, "distil": 1.0},
        {"prune": 0.0, "retrain": 0.0, "budget": None},
        {"gate": "clamped-linear", "budget": None},
        {"swaps": 6.0, "prune_learning_rate": 1e-3, "refit": True},
        {"ramp": 1.0, "distil": 0.0},
    ],
)
def test_options_that_fit(settings):
    options = PrunerOptions(**(NEW | settings))
    assert {name: getattr(options, name) for name in settings} == settings
    assert HeadPruner(options, seed=3).hparams == {**asdict(options), "seed": 3}
    assert options.epochs == options.finetune + options.prune + options.retrain


def test_options_are_frozen_and_checked_again_when_some_are_replaced():
    options = PrunerOptions(**NEW)
    with pytest.raises(FrozenInstanceError):
        options.prune = 2.0
    assert replace(options, prune=2.0) == PrunerOptions(**NEW, prune=2.0) != options
    with pytest.raises(GateError, match="distil is 2"):
        replace(options, distil=2.0)


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        (RunOptions, {"seed": -1}, "--seed is -1; expected a number from 0 to 4,294,967,295"),
        (RunOptions, {"seed": LARGEST_SEED + 1}, "--seed is 4294967296"),
        (RunOptions, {"save_every": 0}, "--save_every is 0; expected at least 1"),
        *(
            (RunOptions, {"name": name}, "expected the name of one folder")
            for name in ("../esc", "a/b", "..", ".", "", " ", "a\nb", "a\0", "a\\\\b", "\udce9")
        ),
        (RunOptions, {"name": "x" * 300}, "--name has 300 bytes; expected at most 200"),
        (ScratchTraining, {"from_scratch_learning_rate": -1.0}, "--from_scratch_learning_rate is -1.0; expected a number"),
        (WeightsKept, {"average_last": 0}, "--average_last is 0; expected at least 1"),
        (WeightsKept, {"patience": 2, "average_last": 3}, "give one of them"),
        (ScratchTraining, {"from_scratch_epochs": 0.0}, "--from_scratch_epochs is 0.0; expected a number above 0"),
        (EndOfRun, {"curve": [1.5]}, "--curve has the budget 1.5; expected fractions of all heads above 0 and at most 1"),
    ],
)
def test_the_options_of_a_run_check_themselves(options, settings, message):
    with pytest.raises(GateError, match=message):
        options(**settings)
    with pytest.raises(GateError, match=message):
        replace(options(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 0}, "--trainer.num_nodes is 0; expected at least 1"),
        ({"devices": 10**15}, "--trainer.devices is 1000000000000000; expected at most"),
        ({"accumulate_grad_batches": -1}, "--trainer.accumulate_grad_batches is -1"),
        ({"limit_train_batches": 0}, "--trainer.limit_train_batches is 0"),
        ({"val_check_interval": 0.0}, "--trainer.val_check_interval is 0.0"),
        ({"accelerator": "mps"}, "--trainer.accelerator is mps, which has no float64"),
        ({"strategy": "fsdp"}, "--trainer.strategy is fsdp, which shards a model"),
        ({"precision": "half"}, "--trainer.precision is 'half'; expected one of 32-true, 64-true, bf16-mixed, 16-mixed"),
        ({"precision": "bf16-true"}, "--trainer.precision is bf16-true, which rounds weight updates"),
    ],
)
def test_the_options_of_the_trainer_check_themselves(settings, message):
    with pytest.raises(GateError, match=message):
        TrainerOptions(**settings)


FIT = [(group, prefix) for group, prefix in GROUPS] + [(kind, "data.") for kind in (Text, Synthetic, ParallelText)]
NONSENSE = {int: (None, 10**23), float: (None, math.nan, math.inf, -math.inf, 1e300), str: (None, "a\0b", "\ud800")}


@pytest.mark.parametrize(("group", "prefix"), [*FIT, *COMPARISON_GROUPS])
def test_no_option_takes_what_its_type_would_let_pass(group, prefix):
    """Nothing, where something is needed; numbers that are not finite or beyond all arithmetic; texts that no file can hold."""
    for name, hint in get_type_hints(group).items():
        for kind, values in NONSENSE.items():
            for value in values if hint is kind else values[1:] if kind in get_args(hint) else ():
                with pytest.raises(GateError, match=f"--{prefix}{name} "):
                    check_values(group, {name: value}, prefix)
    check_values(group, {field.name: field.default for field in fields(group) if field.default is not MISSING}, prefix)
