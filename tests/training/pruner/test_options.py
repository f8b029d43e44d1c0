import pytest

from gates.errors import GateError
from training.pruner.module import HeadPruner

NEW = {"from_scratch": {"model_type": "bert"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"from_scratch": None}, "there is no model"),
        ({"backbone": "also"}, "both a pretrained model .'also'."),
        ({"prune": 0.0}, "prune is 0"),
        ({"prune": 0.0, "retrain": 0.0, "budget": None, "finetune": 0.0}, "prune is 0"),
        ({"retrain": -1.0}, "retrain is -1"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; expected 0 or more"),
        ({"prune_learning_rate": -1e-3}, "prune_learning_rate is -0.001"),
        ({"ramp": 0.0}, "ramp is 0"),
        ({"swaps": 1.0}, "swaps is 1.0; expected 0 for no search"),
        ({"distil": 1.5}, "distil is 1.5"),
        ({"distil_temperature": 0.0}, "distil_temperature is 0"),
        ({"distil_hidden": 1.0, "finetune": 0.0}, "finetune is 0 and the model is new"),
        ({"gate": "relaxed-top-k", "budget": None}, "relaxed-top-k gates need a budget"),
        ({"gate": "clamped-linear", "steering": "multipliers"}, "multipliers steer hard-concrete gates, not clamped-linear"),
        ({"gate": "straight-through-top-k", "anneal": 0.1}, "anneal is 0.1, but it is of hard-concrete gates"),
        ({"gate": "clamped-linear", "straight_through": True}, "straight_through is True, but it is of hard-concrete gates"),
    ],
)
def test_options_that_do_not_fit_are_named_before_anything_is_loaded(settings, message):
    with pytest.raises(GateError, match=message):
        HeadPruner(**(NEW | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"from_scratch": None, "backbone": "a/model", "finetune": 0.0, "distil": 1.0},
        {"prune": 0.0, "retrain": 0.0, "budget": None},
        {"gate": "clamped-linear", "budget": None},
        {"swaps": 6.0, "prune_learning_rate": 1e-3},
    ],
)
def test_options_that_fit(settings):
    assert HeadPruner(**(NEW | settings)).hparams["ramp"] == 0.6
