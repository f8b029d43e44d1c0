"""Roles of a model whose heads are known, of the same attention with its keys exchanged, and the rules themselves."""

import dataclasses

import numpy as np
import pytest
import torch

from gates.roles.roles import (
    COREFERENCE,
    LEAST_COUNT,
    POSITIONAL,
    RARE,
    assign,
    holm,
    p_values,
    specialised,
)
from gates.roles.shares import Shares
from tests.gates.roles.built import Measured, built_model, sentences
from training.stats import significance


@pytest.fixture(scope="module")
def measured():
    return Measured(built_model()).read(sentences())


def test_each_head_of_a_built_model_has_the_role_it_was_built_for(measured):
    assert measured.named() == [["positional"], ["syntactic"], ["rare"], ["broad"]]
    roles = {role.rule.name: role for role in measured.roles()}
    assert roles["positional"].column[0] == "-1"
    assert roles["syntactic"].column[1] in ("near, dependent to head", "far, dependent to head")
    assert roles["syntactic"].strength[1] == 1
    assert roles["rare"].strength[2] == 1
    assert specialised(list(roles.values())).tolist() == [True, True, True, False]


def test_exchanged_keys_have_no_role_but_that_of_attending_to_all_alike():
    assert Measured(built_model()).read(sentences(), shuffled=True).named() == [[], [], [], ["broad"]]


def test_batches_and_padding_change_nothing(measured):
    alone = Measured(built_model()).read(sentences(), batch=1)
    for one, other in zip(measured.metrics, alone.metrics, strict=True):
        for name in ("hits", "chances", "baseline_hits"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), equal_nan=True, rtol=1e-5, atol=1e-6)


def test_two_processes_add_up_to_one(measured):
    texts = sentences()
    halves = []
    for first in (0, 60):
        rows = slice(first, first + 60)
        half = dataclasses.replace(texts, **{name: values[rows] for name, values in vars(texts).items()})
        halves.append(Measured(built_model()).read(half, first=first))
    for whole, one, other in zip(measured.metrics, *(half.metrics for half in halves), strict=True):
        for name in ("hits", "chances", "baseline_hits"):
            torch.testing.assert_close(
                getattr(whole, name), getattr(one, name) + getattr(other, name), equal_nan=True, rtol=1e-5, atol=1e-6
            )
            assert whole._reductions[name] is not None  # added up over processes


def test_the_state_does_not_grow_with_the_data(measured):
    def size(metrics):
        return sum(getattr(metric, name).nelement() for metric in metrics for name in metric._defaults)

    assert size(Measured(built_model()).read(sentences(12)).metrics) == size(measured.metrics)


def shares(values, baselines, *, count=1000.0, error=0.01):
    value, baseline = (torch.tensor(rows, dtype=torch.float64) for rows in (values, baselines))
    full = torch.full_like(value, error)
    return Shares(
        value, full, baseline, torch.zeros_like(value).long(), full, torch.full_like(value, count), value.unsqueeze(0)
    )


def test_holm_is_that_of_the_comparison_and_leaves_out_what_was_not_tested():
    p = torch.tensor([[0.01, 0.04, torch.nan], [0.03, 0.005, 0.5]], dtype=torch.float64)
    found = holm(p)
    expected = significance.holm(p[p.isfinite()].numpy())
    np.testing.assert_allclose(found[p.isfinite()].numpy(), expected)
    assert found[0, 2].isnan()
    assert holm(torch.full((2, 1), torch.nan)).isnan().all()


def test_p_is_one_sided_and_its_error_is_at_least_one_opportunity():
    p = p_values(shares([[0.5, 0.3, 0.5]], [[0.48, 0.3, 0.52]], error=0.0, count=100.0))
    # z = 2, 0, -2 with an error of 1/100
    torch.testing.assert_close(p, torch.tensor([[0.0227501, 0.5, 0.9772499]], dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_role_needs_its_least_share_its_margin_significance_and_opportunities():
    assert assign(POSITIONAL, shares([[0.91], [0.89]], [[0.1], [0.1]]), ["-1"]).holds.tolist() == [True, False]
    assert assign(COREFERENCE, shares([[0.25], [0.24]], [[0.14], [0.15]]), ["x"]).holds.tolist() == [True, False]
    assert assign(RARE, shares([[0.6], [0.4]], [[0.1], [0.1]]), ["x"]).holds.tolist() == [True, False]
    unsure = assign(COREFERENCE, shares([[0.5]], [[0.3]], error=0.2), ["x"])
    assert not unsure.holds.any()
    assert unsure.p.item() > 0.05
    few = assign(COREFERENCE, shares([[0.9]], [[0.1]], count=LEAST_COUNT - 1.0), ["x"])
    assert not few.holds.any()
    assert few.strength.isnan().all()
    assert few.column == [""]


def test_what_is_said_of_a_head_is_of_its_best_passing_column():
    role = assign(COREFERENCE, shares([[0.9, 0.5, 0.3]], [[0.85, 0.2, 0.1]]), ["a", "b", "c"])
    assert role.passing.tolist() == [[False, True, True]]
    assert role.column == ["b"]
    assert (role.strength.item(), role.baseline.item()) == (0.5, 0.2)
    assert role.low.item() == pytest.approx(0.5 - 1.959964 * 0.01)


def test_a_share_without_a_baseline_is_judged_by_itself():
    role = assign(POSITIONAL, shares([[0.95]], [[torch.nan]]), ["x"])
    assert role.holds.all()
    assert role.p.isnan().all()


def test_the_own_share_in_another_column_can_be_the_baseline():
    found = shares([[0.5, 0.45], [0.5, 0.1]], [[0.2, 0.0], [0.2, 0.0]]).against_column(0, 1)
    assert found.baseline[:, 0].tolist() == [0.45, 0.2]
