"""Methods by name, and what a run's options are called."""

import re
from dataclasses import replace

import pytest

from gates.errors import GateError
from tests.training.runs import make_setup
from training.comparison.methods import BASES, LEARNED, NAMES, RENAMED, Method, file_name, own_method, parse_methods
from training.config.comparison import ComparisonOptions
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
        ({"refit": True}, "learned+refit"),
        ({"swaps": 40.0, "refit": True}, "learned+swap+refit"),
        ({"pipelined": False}, "learned(pipelined=false)"),
        ({"init_spread": 1.0, "init_score": "obs", "refit": True}, "learned(start=obs)+refit"),
        ({"init_spread": 1.0}, "learned"),
        ({"budget": None}, "lambda(noise=configured)"),
        ({"budget": None, "draw_per": "batch"}, "lambda"),
        ({"budget": None, "draw_per": "batch", "anneal": 0.1}, "lambda(noise=configured)"),
        ({"budget": None, "pipelined": True}, "lambda(noise=configured, pipelined=true)"),
        ({"budget": None, "swaps": 12.0}, "lambda(noise=configured)+swap"),
        ({"gate": "relaxed-top-k"}, "dsp"),
        ({"gate": "relaxed-top-k", "pipelined": True}, "dsp(pipelined=true)"),
        ({"gate": "straight-through-top-k"}, "straight-through"),
        ({"gate": "clamped-linear"}, "linear-l1"),
        ({"gate": "clamped-linear", "pipelined": True}, "linear-l1(pipelined=true)"),
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
    assert own_method(options).name == ("learned" if name == "learned(once=true)" else name)


def test_ours_are_those_of_this_project_and_every_search_for_a_mask():
    ours = {name: Method.parse(name).is_ours for name in ("learned", "dsp", "his", "his+swap", "dsp+draws", "his+rescale")}
    assert ours == {"learned": True, "dsp": False, "his": False, "his+swap": True, "dsp+draws": True, "his+rescale": False}


OWN_SCORE = f"{__name__}:a_score"


def a_score(subject):
    """Is only named here."""


@pytest.fixture
def masks(tmp_path, monkeypatch):
    """Files with masks in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("mask.json", "a+b.json", "a b.json"):
        (tmp_path / name).write_text("[0, 1]")


def test_scores_and_masks_of_the_users_own_have_names_like_any_other(masks):
    score, mask = Method.parse(f"{OWN_SCORE}+swap+draws"), Method.parse("mask:a+b.json+rescale")
    assert (score.base, score.modifiers, score.name) == (OWN_SCORE, {"draws", "swap"}, f"{OWN_SCORE}+draws+swap")
    assert (mask.base, mask.modifiers, mask.name) == ("mask:a+b.json", {"rescale"}, "mask:a+b.json+rescale")
    assert [(one.is_own_score, one.is_given, one.is_learned) for one in (score, mask, Method("his"))] == [
        (True, False, False), (False, True, False), (False, False, False),
    ]  # fmt: skip
    names = (OWN_SCORE, f"{OWN_SCORE}+swap", "mask:mask.json", "mask:mask.json+swap")
    assert [Method.parse(name).is_ours for name in names] == [False, False, False, True]


def test_in_paths_their_names_have_no_separators_and_others_stay():
    assert file_name("mask:masks/his.json") == "mask_masks_his.json"
    assert file_name("package.module:score+swap") == "package.module_score+swap"
    for name in ("learned(once=true)+draws+swap", "dense.post hoc.greedy"):
        assert file_name(name) == name


def test_own_names_that_lead_nowhere_are_refused_before_anything_runs(masks):
    for names, said in (
        (["no_such_module:score"], "there is no module 'no_such_module'"),
        ([f"{OWN_SCORE}+magic"], "the modifier 'magic'"),
        (["mask:none.json"], "cannot read the mask file 'none.json'"),
        (["mask:none.json+magic"], "cannot read the mask file 'none.json+magic'"),
        (["mask:mask.json+draws"], "draws around a ranking, but mask:mask.json has none"),
        (["mask:a+b.json", "mask:a b.json"], "'mask:a+b.json' and 'mask:a b.json' have the same name in files"),
        ([OWN_SCORE, OWN_SCORE], "given twice"),
    ):
        with pytest.raises(GateError, match=said.replace("+", r"\+")):
            parse_methods(names)


def test_names_that_are_none_or_stand_twice_are_refused():
    for names, said in (
        (["magic"], "unknown method 'magic'; expected one of"),
        (["learend+swap"], "unknown method 'learend' (did you mean 'learned'?); expected one of"),
        (["his+magic"], "the modifier 'magic'"),
        (["his+swap+swap"], "names a modifier twice"),
        (["his+swap", "his+swap"], "given twice"),
        (["his+restarts"], "use learned+restarts"),
        (["learned(pipelined=false)+restarts"], "use learned+restarts"),
        (["learned(start=obs)+restarts"], "use learned+restarts"),
        (["learned+restarts+draws"], "+restarts has none"),
        (["learned+draws+swap", "learned+swap+draws"], "given twice"),
        ([], "no method is given"),
        (["his(size=3)"], "has the parameter 'size'; expected some of granularity, normalise, steps, order"),
        (["random(size=3)"], "has the parameter 'size'; random has none"),
        (["his(steps=3)"], "has steps=3; expected steps to be one of 1, 10"),
        (["his(steps=10, order=worst)"], "has parameters that do not go together; expected one of his, "),
        (["his(steps=10"], "unknown method 'his(steps=10'"),
        (["his-raw-steps+swap"], "has a new name; use his(normalise=false, steps=10)"),
    ):
        with pytest.raises(GateError, match=re.escape(said)):
            parse_methods(names)


def test_parameters_are_read_in_any_order_and_defaults_are_left_out():
    for text, name in (
        ("his(steps=10,granularity=token)", "his(granularity=token, steps=10)"),
        ("his( normalise = False )+swap", "his(normalise=false)+swap"),
        ("his(order=best)", "his"),
        ("entropy(keep=low)", "entropy"),
        ("random()", "random"),
    ):
        assert Method.parse(text).name == name
        assert Method.parse(name) == Method.parse(text)
    for methods in ("his(granularity=token, steps=10),random", ["his(granularity=token", " steps=10)", "random"]):
        names = ComparisonOptions(methods=methods).all_methods  # a list in YAML cuts at every comma
        assert [method.name for method in parse_methods(names)] == ["his(granularity=token, steps=10)", "random"]
    assert set(RENAMED.values()) <= set(BASES)
    assert not set(RENAMED) & set(BASES)
    assert len(NAMES) <= 20
