import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch.utils._python_dispatch import TorchDispatchMode

from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.gating.price import l0_gradient, l0_penalty, solve_price


def step_by_price(log_alpha, price, stretch):
    """Return ``log_alpha`` after a step of gradient descent on the penalty, with a learning rate of 1, within its limits."""
    return (log_alpha - price * l0_gradient(log_alpha, stretch)).clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)


def test_penalty_is_the_price_of_the_expected_number_of_open_heads():
    p = torch.tensor([0.5, 0.25, 1.0])
    assert float(l0_penalty(p, 0.1)) == pytest.approx(0.175)
    assert float(l0_penalty(p, torch.tensor([1.0, 0.0, 2.0]))) == pytest.approx(2.5)


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


@pytest.mark.parametrize("stretch", [Stretch(2 / 3), Stretch(0.5, -0.3, 1.2), Stretch(0.05)])
def test_the_price_is_for_the_gates_stretch(stretch):
    log_alpha = torch.linspace(-2, 2, 20)
    stepped = step_by_price(log_alpha.double(), solve_price(log_alpha, 7.0, stretch), stretch)
    assert open_probability(stepped, stretch).sum() == pytest.approx(7.0, abs=1e-3)


def test_the_price_of_gates_in_half_precision_is_as_good_as_their_rounding():
    log_alpha = torch.linspace(-3, 3, 2001).to(torch.bfloat16)
    stepped = step_by_price(log_alpha, solve_price(log_alpha, 700.0, Stretch()), Stretch())
    assert float(open_probability(stepped.float(), Stretch()).sum()) == pytest.approx(700.0, abs=1.5)


def test_with_costs_the_price_brings_what_is_expected_down_and_dear_gates_fall_further():
    log_alpha, costs, stretch = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 4.0, 0.0]).double(), Stretch()

    def total(probability):
        return (probability * costs).sum(-1)

    asked = 0.6 * float(total(open_probability(log_alpha, stretch)))
    price = solve_price(log_alpha, asked, stretch, costs=costs, total=total)
    stepped = step_by_price(log_alpha.double(), price * costs, stretch)
    assert float(total(open_probability(stepped, stretch))) == pytest.approx(asked, abs=1e-3)
    assert stepped[2] < stepped[1] < stepped[0] < stepped[3] == 1.0


class Counted(TorchDispatchMode):
    """Counts operations, and fails at one that waits for a value on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gates", [8, 700])
def test_solving_takes_thirty_operations_whatever_there_is_to_solve(gates):
    """Each is a launch on a GPU, at every training step."""
    log_alpha = torch.linspace(-3, 3, gates)
    with Counted() as counted:
        solve_price(log_alpha, gates / 3, Stretch())
    assert counted.count <= 30


def test_gates_that_all_cost_nothing_pay_nothing():
    none = torch.zeros(3).double()
    assert float(solve_price(torch.ones(3), 0.1, Stretch(), costs=none, total=lambda p: (p * none).sum(-1) + 1)) == 0.0
