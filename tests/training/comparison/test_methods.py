"""Methods by name, and what a run's options are called."""

from dataclasses import replace

import pytest

from gates.errors import GateError
from tests.training.runs import make_setup
from training.comparison.methods import LEARNED, Method, own_method, parse_methods
from training.scoring.scorers import SCORERS


@pytest.mark.parametrize("base", ["dense", *LEARNED, *SCORERS])
def test_a_name_is_read_and_written(base):
    assert Method.parse(base).name == base
    modifiers = "+distil" if base == "dense" else "+rescale+swap"
    assert Method.parse(base + modifiers).name == base + ("+distil" if base == "dense" else "+swap+rescale")
    assert Method.parse(base).is_learned == (base in LEARNED)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "learned"),
        ({"swaps": 40.0}, "learned+swap"),
        ({"pipelined": True}, "learned-pipelined"),
        ({"budget": None}, "priced"),
        ({"budget": None, "draw_per": "batch"}, "lambda"),
        ({"budget": None, "draw_per": "batch", "anneal": 0.1}, "priced"),
        ({"budget": None, "pipelined": True}, "priced-pipelined"),
        ({"budget": None, "swaps": 12.0}, "priced+swap"),
        ({"gate": "relaxed-top-k"}, "dsp"),
        ({"gate": "relaxed-top-k", "pipelined": True}, "dsp-pipelined"),
        ({"gate": "straight-through-top-k"}, "straight-through"),
        ({"gate": "clamped-linear"}, "linear-l1"),
        ({"gate": "clamped-linear", "pipelined": True}, "linear-l1-pipelined"),
        ({"budget": None, "prune": 0.0, "retrain": 0.0}, "dense"),
    ],
)
def test_a_runs_own_method_is_what_a_comparison_calls_it(options, name):
    method = own_method(make_setup(**options).model)
    assert method.name == name
    assert Method.parse(name) == method


@pytest.mark.parametrize("name", LEARNED)
def test_options_of_a_method_make_a_run_that_is_called_so(name):
    """But for the one that learns once for all budgets, which is a matter of several."""
    options = replace(make_setup().model, **LEARNED[name].options)
    assert own_method(options).name == ("learned" if name == "learned-once" else name)


def test_ours_are_those_of_this_project_and_every_search_for_a_mask():
    ours = {name: Method.parse(name).is_ours for name in ("learned", "dsp", "his", "his+swap", "dsp+draws", "his+rescale")}
    assert ours == {"learned": True, "dsp": False, "his": False, "his+swap": True, "dsp+draws": True, "his+rescale": False}


def test_names_that_are_none_or_stand_twice_are_refused():
    for names, said in (
        (["magic"], "unknown method 'magic'"),
        (["his+magic"], "the modifier 'magic'"),
        (["his+swap+swap"], "names a modifier twice"),
        (["his+swap", "his+swap"], "given twice"),
        (["learned+draws+swap", "learned+swap+draws"], "given twice"),
        ([], "no method is given"),
    ):
        with pytest.raises(GateError, match=said.replace("+", r"\+")):
            parse_methods(names)
