import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from gates.budget import Budget
from gates.families.hard_concrete import LOG_ALPHA_LIMIT, HardConcrete, Stretch, open_probability
from gates.objective import TargetBudget, l0_gradient, l0_penalty, project_to_budget, solve_price, step_by_price

HEADS = {"encoder": 8, "decoder": 12, "cross": 12}
KIND_INDEX = torch.tensor([0] * 8 + [1] * 12 + [2] * 12)


def test_penalty_is_the_price_of_the_expected_number_of_open_heads():
    p = torch.tensor([0.5, 0.25, 1.0])
    assert float(l0_penalty(p, 0.1)) == pytest.approx(0.175)
    assert float(l0_penalty(p, torch.tensor([1.0, 0.0, 2.0]))) == pytest.approx(2.5)


def test_target_moves_from_all_heads_to_what_the_budget_comes_to():
    target = TargetBudget(Budget(8, {}), {"encoder": 32}, Stretch())
    gates = HardConcrete(32)
    with torch.no_grad():
        gates.log_alpha[:8], gates.log_alpha[8:] = LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT
    reachable = gates.open_probability().mean().item()
    assert float(target.target(0.0)) == 1.0
    assert float(target.target(1.0)) == pytest.approx(reachable, abs=1e-6)
    assert float(target.target(0.5)) == pytest.approx((1 + reachable) / 2, abs=1e-6)


@pytest.mark.parametrize("budget", [Budget(8, {}), Budget(20, {"encoder": 2, "decoder": 12, "cross": 6})])
def test_the_target_alone_brings_the_expectation_to_the_budget(budget):
    torch.manual_seed(0)
    gates, target = HardConcrete(32), TargetBudget(budget, HEADS, Stretch())
    with torch.no_grad():
        gates.log_alpha.add_(0.1 * torch.randn(32))
    optimizer = torch.optim.AdamW(
        [
            {"params": [gates.log_alpha], "lr": 0.05, "weight_decay": 0.0},
            {"params": target.parameters(), "lr": 0.1, "weight_decay": 0.0, "maximize": True},
        ]
    )
    for step in range(600):
        optimizer.zero_grad()
        target(gates.open_probability(), KIND_INDEX, step / 300).backward()
        optimizer.step()
        gates.clamp_()
    fraction = target.expected(gates.open_probability(), KIND_INDEX) / target.heads
    assert torch.allclose(fraction, target.target(1.0), atol=0.06)
    assert float(target.lambda1.detach().max()) > 0


def test_no_penalty_on_target():
    target = TargetBudget(Budget(16, {}), HEADS, Stretch())
    with torch.no_grad():
        target.lambda1.fill_(1.0)
        target.lambda2.fill_(1.0)
    assert float(target(torch.ones(32), KIND_INDEX, 0.0).detach()) == pytest.approx(0.0, abs=1e-6)
    assert float(target(torch.ones(32), KIND_INDEX, 1.0).detach()) > 0.3


@pytest.mark.parametrize("stretch", [Stretch(), Stretch(0.5, -0.3, 1.2), Stretch(0.05)])
def test_the_gradient_of_the_expectation_is_autograds(stretch):
    log_alpha = torch.linspace(-4, 4, 9, requires_grad=True)
    (expected,) = torch.autograd.grad(open_probability(log_alpha, stretch).sum(), log_alpha)
    torch.testing.assert_close(l0_gradient(log_alpha.detach(), stretch), expected)


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=40), st.floats(0.05, 0.95))
@settings(deadline=None, max_examples=60)
def test_the_price_is_the_root_that_scipy_finds(values, share):
    """The expectation after a step is as asked; where it is less already, nothing is to be paid."""
    log_alpha, stretch = torch.tensor(values, dtype=torch.float64), Stretch()
    low, high = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch).tolist()
    asked = len(values) * (low + share * (high - low))

    def excess(price):
        probability = 1 / (1 + np.exp(-(log_alpha.numpy() + 0.33 * np.log(11))))
        stepped = np.clip(log_alpha.numpy() - price * probability * (1 - probability), -LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        return (1 / (1 + np.exp(-(stepped + 0.33 * np.log(11))))).sum() - asked

    price = float(solve_price(log_alpha.float(), asked, stretch))
    if excess(0.0) <= 0:
        assert price == pytest.approx(0.0, abs=1e-4)
    else:
        assert price == pytest.approx(brentq(excess, 0.0, 1e5), rel=1e-2, abs=1e-3)
        assert abs(excess(price)) < 1e-3
        assert open_probability(step_by_price(log_alpha, torch.tensor(price), stretch), stretch).sum() == pytest.approx(
            asked, abs=1e-3
        )


def test_a_price_lets_the_lowest_of_two_gates_close_first_and_open_ones_stay():
    """A shift keeps their distance; the gradient of the expectation is largest in the middle."""
    log_alpha = torch.tensor([4.0, 1.0, 0.0])
    stepped = step_by_price(log_alpha, solve_price(log_alpha, 1.7, Stretch()).float(), Stretch())
    fallen = log_alpha - stepped
    assert fallen[0] < 0.2 * fallen[1] < 0.2 * fallen[2]


@pytest.mark.parametrize("values", [[LOG_ALPHA_LIMIT] * 6, [0.0, 0.0, LOG_ALPHA_LIMIT]])
def test_every_budget_has_its_price(values):
    log_alpha, stretch = torch.tensor(values), Stretch()
    closed = float(open_probability(torch.tensor(-LOG_ALPHA_LIMIT), stretch))
    stepped = step_by_price(log_alpha.double(), solve_price(log_alpha, 0.0, stretch), stretch)
    assert open_probability(stepped, stretch).sum() == pytest.approx(closed * len(values), abs=1e-4)


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=40), st.floats(0.05, 0.95))
@settings(deadline=None, max_examples=60)
def test_projection_reaches_the_expectation_and_keeps_the_order(values, share):
    log_alpha, stretch = torch.tensor(values), Stretch()
    low, high = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch)
    asked = len(values) * float(low + share * (high - low))
    projected = project_to_budget(log_alpha, asked, stretch)
    assert open_probability(projected, stretch).sum() == pytest.approx(asked, abs=1e-3)
    assert projected.abs().max() <= LOG_ALPHA_LIMIT + 1e-5
    order = projected[log_alpha.argsort()]
    assert bool((order.diff() >= -1e-6).all())


def test_projection_is_a_shift_where_no_limit_is_met():
    log_alpha = torch.tensor([-0.5, 0.0, 0.7])
    shift = project_to_budget(log_alpha, 1.2, Stretch()) - log_alpha
    assert shift.max() - shift.min() < 1e-5


def test_a_projection_onto_the_present_expectation_changes_nothing():
    log_alpha = torch.randn(20, generator=torch.Generator().manual_seed(0))
    now = float(open_probability(log_alpha, Stretch()).sum())
    torch.testing.assert_close(project_to_budget(log_alpha, now, Stretch()), log_alpha, atol=1e-4, rtol=0)


@pytest.mark.parametrize("values", [[LOG_ALPHA_LIMIT] * 6, [-LOG_ALPHA_LIMIT] * 6, [0.0, 0.0, 10.0], [-10.0, 0.0, 0.0], [20.0]])
@pytest.mark.parametrize("share", [0.01, 0.99])
def test_projection_reaches_both_ends_from_anywhere(values, share):
    stretch = Stretch()
    low, high = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch)
    asked = len(values) * float(low + share * (high - low))
    projected = project_to_budget(torch.tensor(values), asked, stretch)
    assert open_probability(projected, stretch).sum() == pytest.approx(asked, abs=1e-3)


def test_projection_is_for_the_gates_stretch():
    for stretch in (Stretch(2 / 3), Stretch(0.5, -0.3, 1.2), Stretch(0.05)):
        projected = project_to_budget(torch.linspace(-2, 2, 20), 7.0, stretch)
        assert open_probability(projected, stretch).sum() == pytest.approx(7.0, abs=1e-3)


def test_a_projection_of_half_precision_is_as_good_as_its_rounding():
    log_alpha = torch.linspace(-3, 3, 2001).to(torch.bfloat16)
    projected = project_to_budget(log_alpha, 700.0, Stretch())
    assert projected.dtype == torch.bfloat16
    assert float(open_probability(projected.float(), Stretch()).sum()) == pytest.approx(700.0, abs=0.25)


def test_a_target_starts_without_a_price_and_its_multipliers_are_its_state():
    target = TargetBudget(Budget(8, {"encoder": 2, "cross": 6}), HEADS, Stretch())
    assert {name: tensor.tolist() for name, tensor in target.state_dict().items()} == {"lambda1": [0, 0], "lambda2": [0, 0]}


def test_the_reachable_target_is_that_of_the_stretch():
    stretch = Stretch(0.8, -0.4, 1.3)
    closed, opened = open_probability(torch.tensor([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT]), stretch).tolist()
    target = TargetBudget(Budget(8, {}), HEADS, stretch)
    assert float(target.target(1.0)) == pytest.approx((8 * opened + 24 * closed) / 32)


def test_the_penalty_is_the_sum_over_kinds():
    target = TargetBudget(Budget(8, {"encoder": 2, "cross": 6}), HEADS, Stretch(), start=0.9)
    with torch.no_grad():
        target.lambda1.copy_(torch.tensor([0.5, -2.0]))
        target.lambda2.copy_(torch.tensor([3.0, 0.25]))
    p = torch.linspace(0.05, 0.95, 32)
    expected = 0.0
    for kind, count, price, square in ((0, 8, 0.5, 3.0), (2, 12, -2.0, 0.25)):
        excess = float(p[kind == KIND_INDEX].sum()) / count - 0.9
        expected += price * excess + square * excess**2
    assert float(target(p, KIND_INDEX, 0.0).detach()) == pytest.approx(expected, rel=1e-5)


def test_the_target_stays_at_its_ends():
    target = TargetBudget(Budget(8, {}), HEADS, Stretch(), start=0.7)
    assert float(target.target(-0.5)) == pytest.approx(0.7)
    assert float(target.target(7.0)) == pytest.approx(float(target.target(1.0)))
