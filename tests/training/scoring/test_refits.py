"""Weights refitted to a mask, with the ridge that does best on the selection split."""

import math
from dataclasses import replace

import pytest
import torch

from tests.training.runs import make_data, make_pruner, make_trainer
from tests.training.scoring.subjects import make_subject
from training.config import RefitSearch
from training.pruner.module import evaluate
from training.scoring import refits
from training.scoring.refits import best_refit_, best_refits_, quality, refitted_to_best_
from training.scoring.subject import ScoringContext

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
@pytest.mark.parametrize("reached", [[3, 2, 1], [1, 3, 2], [1, 2, 3], [2, 1, 2], [-2, -3, -1], [0, 0, 0]])
@pytest.mark.parametrize("place", [0, 1])
def test_the_weights_that_stay_are_those_of_the_best_ridge(scripted, place, reached, lower_is_better):
    """All qualities differ, so that the worst would be seen. The other mask is in between. The first of equals stays."""
    subject, judged, fitted = scripted
    subject.task.lower_is_better = lower_is_better
    start = parameters_of(subject)
    others = [1.5, 1.5, 1.5]
    alone = 10 if lower_is_better else -10  # the mask alone is worse than any refit
    judged(*([alone, *reached, alone, *others] if place == 0 else [alone, *others, alone, *reached]))
    masks = [MASK, 1 - MASK] if place == 0 else [1 - MASK, MASK]
    search = RefitSearch(ridges=RIDGES, rows=8, feed_forward=not RefitSearch().feed_forward)
    done = best_refits_(subject, masks, search, start)
    best_of = min if lower_is_better else max
    of_mask, of_other = done[place], done[1 - place]
    assert of_mask.tried == reached
    assert of_mask.reached == best_of(reached)
    assert of_mask.ridge == RIDGES[reached.index(best_of(reached))]
    assert (of_other.ridge, of_other.reached, of_other.tried) == (RIDGES[0], 1.5, others)
    kept = of_mask.ridge if best_of(of_mask.reached, 1.5) != 1.5 else RIDGES[0]
    for name, parameter in parameters_of(subject).items():
        torch.testing.assert_close(parameter, start[name] + kept)
    assert [ridge for _, _, ridge, _, _ in fitted] == RIDGES * 2
    assert all(mask is masks[number // 3] for number, (mask, *_) in enumerate(fitted))
    assert all(dense is start and rows == 8 and wide == search.feed_forward for _, dense, _, rows, wide in fitted)


@pytest.mark.parametrize(
    ("qualities", "ridge", "reached"),
    [
        ([0.5, math.nan, math.nan], None, 0.5),
        ([0.5, math.nan, 0.7], 1.0, 0.7),
        ([math.nan, 0.5, math.nan], 0.1, 0.5),
        ([math.nan] * 3, None, math.nan),
    ],
)
def test_a_refit_whose_quality_is_no_number_is_not_applied(scripted, qualities, ridge, reached):
    subject, judged, _ = scripted
    dense = parameters_of(subject)
    judged(*qualities)
    found = best_refit_(subject, MASK, RefitSearch(ridges=[0.1, 1.0], rows=8), dense)
    assert found.ridge == ridge
    assert found.reached == pytest.approx(reached, nan_ok=True)
    assert all(torch.equal(tensor, dense[name]) for name, tensor in parameters_of(subject).items()) == (ridge is None)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_refit_that_is_worse_than_none_is_not_applied(scripted, capsys, sign):
    """The selection split judges; an equal refit is applied, and with several masks the best of all stays."""
    subject, judged, _ = scripted
    subject.task.lower_is_better = sign < 0
    dense, search = parameters_of(subject), RefitSearch(ridges=[0.1, 1.0], rows=8)

    def unchanged():
        return all(torch.equal(tensor, dense[name]) for name, tensor in parameters_of(subject).items())

    judged(*(sign * one for one in (0.5, 0.3, 0.4)))
    found = best_refit_(subject, MASK, search, dense)
    assert (found.ridge, found.reached, found.unrefitted) == (None, sign * 0.5, sign * 0.5)
    assert found.tried == [sign * 0.3, sign * 0.4]
    assert unchanged()
    assert found.as_plain(search) | {"ridge": None, "unrefitted": sign * 0.5} == found.as_plain(search)
    said = f"is {sign * 0.5:.4f} with the mask of 3 alone and {sign * 0.4:.4f} after the best refit, so the weights stay"
    assert said in " ".join(capsys.readouterr().out.split())
    judged(*(sign * one for one in (0.5, 0.3, 0.6, 0.7, 0.1, 0.2)))  # the second mask alone is best
    first, second = best_refits_(subject, [MASK, 1 - MASK], search, dense)
    assert (first.ridge, second.ridge, second.reached) == (1.0, None, sign * 0.7)
    assert unchanged()
    judged(*(sign * one for one in (0.5, 0.4, 0.2, 0.1, 0.3, 0.1)))  # the first mask alone is better than the second's refit
    first, second = best_refits_(subject, [MASK, 1 - MASK], search, dense)
    assert (first.ridge, second.ridge) == (None, 0.1)
    assert unchanged()
    capsys.readouterr()
    judged(*(sign * one for one in (0.5, 0.5, 0.4)))
    assert best_refit_(subject, MASK, search, dense).ridge == 0.1
    assert not unchanged()
    assert "stay as they were" not in capsys.readouterr().out


@pytest.fixture
def small_search(monkeypatch):
    """The search of a run's own refit."""
    search = RefitSearch(ridges=[0.01, 1.0], rows=8)
    monkeypatch.setattr(refits, "RefitSearch", lambda: search)
    return search


@pytest.mark.integration
@pytest.mark.parametrize("retrain", [1.0, 0.0])
def test_a_run_refits_between_prune_and_retrain_towards_the_dense_model(retrain, small_search):
    """As by hand on the weights of that moment, towards those at the end of fine-tuning."""
    options = {"learning_rate": 3e-3, "retrain": retrain}
    plain, data = make_pruner(**options), make_data()
    make_trainer(limit_val_batches=1.0, max_steps=16).fit(plain, data)  # the end of fine-tuning
    kept = parameters_of(ScoringContext(plain, data, make_trainer(limit_val_batches=1.0)))
    pruned = make_pruner(**options)
    make_trainer(limit_val_batches=1.0, max_steps=32).fit(pruned, make_data())  # the end of the prune phase
    by_hand = ScoringContext(pruned, data, make_trainer(limit_val_batches=1.0))
    expected = best_refit_(by_hand, pruned.steering.learned_mask(), small_search, kept)
    refitting = make_pruner(**options, refit=True)
    make_trainer(limit_val_batches=1.0).fit(refitting, make_data())
    assert refitting.refitted["tried"] == expected.tried
    assert refitting.refitted["ridge"] == expected.ridge
    assert torch.equal(refitting.gates.mask, pruned.steering.learned_mask())
    for name, parameter in parameters_of(by_hand).items() if not retrain else ():
        torch.testing.assert_close(refitting.backbone.get_parameter(name).detach(), parameter, rtol=1e-5, atol=1e-6)
    assert refitting.teacher is None


@pytest.mark.integration
@pytest.mark.parametrize("turned", [False, True])
def test_of_several_masks_the_one_of_the_best_refit_stays_with_its_weights(turned, small_search):
    """As by refitting to each of them alone; a mask that is given twice is fitted once."""
    masks = [MASK, 1 - MASK, MASK]
    masks = masks[1::-1] if turned else masks
    subject = with_a_selection_split(make_subject())
    dense = parameters_of(subject)
    taken, plain = refitted_to_best_(subject, masks, dense)
    alone = []
    for mask in masks[:2]:
        one = with_a_selection_split(make_subject())
        alone.append((best_refit_(one, mask, small_search, dense), parameters_of(one)))
    best = max((0, 1), key=lambda number: max(map(subject.task.gain, alone[number][0].tried)))
    assert torch.equal(taken, masks[best])
    assert (plain["tried"], plain["ridge"]) == (alone[best][0].tried, alone[best][0].ridge)
    assert [(one["mask"], one["tried"]) for one in plain["others"]] == [(masks[1 - best].tolist(), alone[1 - best][0].tried)]
    for name, parameter in parameters_of(subject).items():
        torch.testing.assert_close(parameter, alone[best][1][name], rtol=1e-5, atol=1e-6)
