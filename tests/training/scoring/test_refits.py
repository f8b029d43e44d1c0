"""Weights refitted to a mask, with the ridge that does best on the selection split."""

import math
from dataclasses import replace

import pytest
import torch

from tests.training.runs import make_trainer
from tests.training.scoring.subjects import make_subject
from training.config import RefitSearch
from training.pruner.module import evaluate
from training.scoring import refits
from training.scoring.refits import best_refit_, quality

MASK = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0])


def with_a_selection_split(subject):
    return replace(subject, trainer=make_trainer(limit_val_batches=1.0))


def parameters_of(subject):
    return {name: parameter.detach().clone() for name, parameter in subject.backbone.named_parameters()}


def test_quality_is_what_evaluation_says():
    subject = with_a_selection_split(make_subject())
    with subject.module.fixed_to(MASK):
        subject.module.gates.set_mask_(MASK)
        expected = evaluate(make_trainer(limit_val_batches=1.0), subject.module, subject.data, ("select",))
    subject.module.gates.mode = "stochastic"
    assert quality(subject, MASK) == pytest.approx(expected[f"select_{subject.task.main_metric}"], abs=1e-6)
    assert subject.module.gates.mode == "stochastic"


def test_the_best_ridge_is_taken_and_its_weights_stay():
    """As by refitting with that ridge alone; of equals the first."""
    one = with_a_selection_split(make_subject())
    dense = parameters_of(one)
    search = RefitSearch(ridges=[100.0, 0.01, 0.1], rows=8)
    found = best_refit_(one, MASK, search, dense)
    assert found.reached == max(found.tried)
    assert found.ridge == search.ridges[found.tried.index(found.reached)]
    assert len(found.tried) == 3
    alone = with_a_selection_split(make_subject())
    again = best_refit_(alone, MASK, RefitSearch(ridges=[found.ridge], rows=8), dense)
    assert again.tried == [max(found.tried)]
    assert quality(one, MASK) == max(found.tried)
    changed = [name for name, tensor in parameters_of(one).items() if not torch.equal(tensor, dense[name])]
    assert changed
    assert all("output.dense" in name for name in changed)
    assert all(torch.equal(tensor, parameters_of(alone)[name]) for name, tensor in parameters_of(one).items())


RIDGES = [0.25, 1.0, 4.0]


@pytest.fixture
def scripted(monkeypatch):
    """A subject with scripted qualities, whose refit adds the ridge to all weights."""
    subject, fitted = with_a_selection_split(make_subject()), []

    def add(found, mask, dense, *, ridge, rows, feed_forward):
        fitted.append((mask, dense, ridge, rows, feed_forward))
        for parameter in found.backbone.parameters():
            parameter.data.add_(ridge)

    def judged(*qualities):
        left = list(map(float, qualities))
        monkeypatch.setattr(refits, "quality", lambda *_: left.pop(0))

    monkeypatch.setattr(refits, "refit", add)
    return subject, judged, fitted


@pytest.mark.parametrize("lower_is_better", [False, True])
@pytest.mark.parametrize("reached", [[3, 2, 1], [1, 3, 2], [2, 1, 2], [-2, -3, -1]])
def test_the_weights_that_stay_are_those_of_the_best_ridge(scripted, reached, lower_is_better):
    """The first of equals stays."""
    subject, judged, fitted = scripted
    subject.task.lower_is_better = lower_is_better
    start = parameters_of(subject)
    judged(10 if lower_is_better else -10, *reached)  # the mask alone is worse than any refit
    search = RefitSearch(ridges=RIDGES, rows=8, feed_forward=not RefitSearch().feed_forward)
    found = best_refit_(subject, MASK, search, start)
    best = (min if lower_is_better else max)(reached)
    assert (found.tried, found.reached, found.ridge) == (reached, best, RIDGES[reached.index(best)])
    for name, parameter in parameters_of(subject).items():
        torch.testing.assert_close(parameter, start[name] + found.ridge)
    assert fitted == [(MASK, start, ridge, 8, search.feed_forward) for ridge in RIDGES]


@pytest.mark.parametrize(
    ("qualities", "ridge", "reached"),
    [
        ([0.5, math.nan, math.nan], None, 0.5),
        ([0.5, math.nan, 0.7], 1.0, 0.7),
        ([math.nan, 0.5, math.nan], 0.1, 0.5),
        ([math.nan] * 3, None, math.nan),
        ([0.5, 0.3, 0.4], None, 0.5),
        ([0.5, 0.5, 0.4], 0.1, 0.5),  # an equal refit is applied
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_refit_that_is_worse_than_none_or_no_number_is_not_applied(scripted, capsys, qualities, ridge, reached, sign):
    subject, judged, _ = scripted
    subject.task.lower_is_better = sign < 0
    dense = parameters_of(subject)
    judged(*(sign * one for one in qualities))
    found = best_refit_(subject, MASK, RefitSearch(ridges=[0.1, 1.0], rows=8), dense)
    assert found.ridge == ridge
    assert [found.unrefitted, *found.tried] == pytest.approx([sign * one for one in qualities], nan_ok=True)
    assert found.reached == pytest.approx(sign * reached, nan_ok=True)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in parameters_of(subject).items()) == (ridge is None)
    if qualities == [0.5, 0.3, 0.4]:
        said = f"is {sign * 0.5:.4f} with the mask of 3 alone and {sign * 0.4:.4f} after the best refit"
        assert said in " ".join(capsys.readouterr().out.split())
