"""Weights refitted to a mask, where that helps on the selection split."""

import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from tests.training.runs import make_trainer
from tests.training.scoring.subjects import make_subject
from training.config import RefitOptions
from training.pruner.module import evaluate
from training.scoring import passes, refits
from training.scoring.refits import Quality, RefitError, quality, refit_if_better_, rises
from training.stats.numbers import quantity

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
    found = quality(subject, MASK)
    assert found[:2] == pytest.approx((expected[f"select_{subject.task.main_metric}"], expected["select_loss"]), abs=1e-6)
    assert float(found.losses.mean()) == pytest.approx(found.loss)
    assert subject.module.gates.mode == "stochastic"


def test_the_weights_are_refitted_with_the_ridges_and_the_rows(monkeypatch):
    """As by the library, with the same batches."""
    one, seen = with_a_selection_split(make_subject()), []
    dense = parameters_of(one)
    refit = passes.refit_
    monkeypatch.setattr(passes, "refit_", lambda *given, **options: seen.append(refit(*given, **options)) or seen[-1])
    search = RefitOptions(ridges=[100.0, 0.01, 0.1], rows=8)
    found = refit_if_better_(one, MASK, search, dense)
    assert {fitted.ridge for fitted in seen[0]} <= set(search.ridges)
    assert found.reached == found.refitted == quality(one, MASK).metric
    assert found.loss == quality(one, MASK).loss
    changed = [name for name, tensor in parameters_of(one).items() if not torch.equal(tensor, dense[name])]
    assert changed
    assert all("output.dense" in name for name in changed)


@pytest.fixture
def scripted(monkeypatch):
    """A subject with scripted qualities, whose refit adds 1 to all weights."""
    subject = with_a_selection_split(make_subject())

    def add(found, mask, dense, search):
        for parameter in found.backbone.parameters():
            parameter.data.add_(1.0)

    def judged(*qualities, changes=(1.0, 1.0, 1.0)):
        losses = (torch.zeros(len(changes)), torch.tensor(changes))
        left = [Quality(float(one), loss, own) for one, loss, own in zip(qualities, (1.0, 2.0), losses, strict=True)]
        monkeypatch.setattr(refits, "quality", lambda *_: left.pop(0))

    monkeypatch.setattr(refits, "refit", add)
    return subject, judged


@pytest.mark.parametrize(
    ("alone", "refitted", "is_applied"),
    [
        (0.5, 0.7, True),
        (0.5, 0.5, True),  # an equal refit is applied
        (0.5, 0.4, False),
        (0.5, math.nan, False),
        (math.nan, 0.5, True),
        (math.nan, math.nan, False),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_refit_that_is_worse_than_none_or_no_number_is_not_applied(scripted, capsys, alone, refitted, is_applied, sign):
    subject, judged = scripted
    subject.task.lower_is_better = sign < 0
    dense = parameters_of(subject)
    judged(sign * alone, sign * refitted)
    found = refit_if_better_(subject, MASK, RefitOptions(), dense)
    assert found.is_applied == is_applied
    expected = [sign * alone, sign * refitted, sign * (refitted if is_applied else alone)]
    assert [found.unrefitted, found.refitted, found.reached] == pytest.approx(expected, nan_ok=True)
    assert found.loss == (2.0 if is_applied else 1.0)
    for name, parameter in parameters_of(subject).items():
        torch.testing.assert_close(parameter, dense[name] + is_applied, rtol=0, atol=0)
    if refitted == 0.4:
        before, after = (quantity(subject.task.main_metric, sign * value) for value in (0.5, 0.4))
        said = f"is {before} with a mask of 3 alone and {after} after the refit"
        assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), None])
def test_a_refit_without_memory_is_no_end_of_the_run(scripted, monkeypatch, error):
    """On a CPU with the error that PyTorch itself raises."""
    subject, judged = scripted
    judged(0.5, 0.5)

    def fails(*_):
        if error is not None:
            raise error
        torch.empty(2**60)

    monkeypatch.setattr(refits, "refit", fails)
    with pytest.raises(RefitError, match="cpu has too little memory for a refit on"):
        refit_if_better_(subject, MASK, RefitOptions(), parameters_of(subject))


def test_another_error_of_a_refit_is_shown_as_it_is(scripted, monkeypatch):
    subject, judged = scripted
    judged(0.5, 0.5)

    def fails(*_):
        raise RuntimeError("a matrix is singular")

    monkeypatch.setattr(refits, "refit", fails)
    with pytest.raises(RuntimeError, match="a matrix is singular"):
        refit_if_better_(subject, MASK, RefitOptions(), parameters_of(subject))


@pytest.mark.parametrize(
    ("changes", "is_applied"),
    [
        ((0.1, 0.2, 0.1, 0.2), False),
        ((1.5, -0.9, -0.5, 0.4), True),  # its mean, 0.125, is a fifth of its standard error
        ((-0.1, -0.2, -0.1, 0.0), True),
        ((0.3,), False),
        ((0.0, 0.0), True),
        ((math.inf, 0.1), False),
    ],
)
def test_a_worse_metric_needs_a_clearly_higher_loss(scripted, changes, is_applied):
    """A few examples of a small split decide its metric."""
    subject, judged = scripted
    judged(0.8, 0.7, changes=changes)
    assert refit_if_better_(subject, MASK, RefitOptions(), parameters_of(subject)).is_applied == is_applied


def test_the_noise_of_a_loss_is_students(scripted):
    changes = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    for shift in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5):
        t = stats.ttest_1samp((changes + shift).numpy(), 0).statistic
        assert rises(scripted[0], changes + shift) == (t > 2)
