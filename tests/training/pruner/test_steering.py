"""GateController of gates on a model without training: against the formulas, for every way to a number of open gates."""

import pytest
import torch

from gates.attention.sites import KINDS
from gates.gating.budget import Budget
from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from tests.models import build
from tests.training.runs import make_options
from training.pruner.steering import GateController, kinds_to_prune, new_gates


def make_steering(family="bert", **settings):
    options, model = make_options(**settings), build(family)
    kinds = kinds_to_prune(options, ["encoder"] if family == "bert" else KINDS)
    return GateController(options, new_gates(options, model, kinds), kinds)


def spread_(steering, low=-3.0, high=3.0):
    """Different gates, in no order."""
    size = steering.gates.size
    with torch.no_grad():
        steering.gates.log_alpha.copy_(
            torch.linspace(low, high, size)[torch.randperm(size, generator=torch.Generator().manual_seed(0))]
        )
    return steering.gates.log_alpha.detach()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"budget": 3}, None),
        ({"budget": {"decoder": 3, "encoder": 2}}, ["encoder", "decoder"]),
        ({"budget": None, "price": 0.1}, None),
        ({"budget": None, "price": {"cross": 0.1, "encoder": 0.0}}, ["cross"]),
        ({"budget": 3, "price": {"cross": 0.1}}, None),
    ],
)
def test_kinds_with_a_budget_or_a_price_are_pruned(settings, expected):
    assert kinds_to_prune(make_options(**settings), KINDS) == expected


# -- while gates are trained -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["hard-concrete", "clamped-linear"])
@pytest.mark.parametrize(("price", "prices"), [(0.3, [0.3, 0.3, 0.3]), ({"encoder": 0.5, "cross": 0.1}, [0.5, 0.0, 0.1])])
def test_a_price_is_paid_for_expected_open_gates_in_proportion_to_the_ramp(gate, price, prices):
    steering = make_steering("marian", budget=None, price=price, gate=gate)
    spread_(steering, 0.1, 0.9)
    probability, kinds = steering.gates.open_probability().detach(), steering.gates.kind_index()
    expected = sum(each * float(probability[kinds == index].sum()) for index, each in enumerate(prices))
    assert float(steering.penalty(1.0).detach()) == pytest.approx(expected, rel=1e-5)
    assert float(steering.penalty(0.25).detach()) == pytest.approx(0.25 * expected, rel=1e-5)
    steering.penalty(0.0).backward()
    assert torch.equal(steering.gates.log_alpha.grad, torch.zeros(32))  # a gradient, as every process needs one, of nothing


def test_clamped_gates_pay_a_price_with_a_budget_too_and_other_kinds_pay_nothing():
    steering = make_steering("marian", budget={"encoder": 3}, price=0.5, gate="clamped-linear")
    spread_(steering, 0.1, 0.9)
    encoder = steering.gates.kind_index() == 0
    assert (steering.prices[~encoder] == 0).all()
    expected = 0.5 * float(steering.gates.open_probability().detach()[encoder].sum())
    assert float(steering.penalty(1.0).detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"gate": "relaxed-top-k"}, {"gate": "straight-through-top-k"}])
def test_who_is_held_to_a_budget_pays_nothing(settings):
    steering = make_steering(**settings)
    penalty = steering.penalty(1.0)
    penalty.backward()
    assert float(penalty.detach()) == 0.0
    assert torch.equal(steering.gates.log_alpha.grad, torch.zeros(8))


def optimizer_of(steering, kind=torch.optim.AdamW):
    return kind([{"params": [steering.gates.log_alpha], "lr": 0.05, "weight_decay": 0.0}])


@pytest.mark.parametrize("budget", [5, {"encoder": 2, "cross": 5}])
def test_what_gates_feel_is_the_gradient_of_the_task_loss_plus_the_price(budget):
    """Plain gradient descent, so that the step is the gradient: of the task loss, then of the price times the expectation."""
    steering = make_steering("marian", budget=budget)
    spread_(steering, -1, 3)
    log_alpha, kinds = steering.gates.log_alpha, steering.gates.kind_index()
    optimizer, task = optimizer_of(steering, torch.optim.SGD), torch.randn(32, generator=torch.Generator().manual_seed(2))
    (log_alpha * task).sum().backward()
    log_alpha.grad[~(steering.gates.is_learned if steering.gates.is_learned is not None else kinds >= 0)] = 0
    before = log_alpha.detach().clone()
    optimizer.step()
    middle = log_alpha.detach().clone().requires_grad_()
    torch.testing.assert_close(middle, before - 0.05 * log_alpha.grad)
    steering.enforce_(1.0, optimizer)
    paid = steering.price_by_kind(1.0)
    assert all(price > 0 for kind, price in paid.items() if kind != "decoder" or budget == 5)  # whole, it pays nothing
    penalty = sum(
        price * open_probability(middle, Stretch(0.33))[kinds == KINDS.index(kind)].sum() for kind, price in paid.items()
    )
    penalty.backward()
    inside = log_alpha.detach().abs() < 4.6
    expected = middle.detach() - 0.05 * middle.grad
    torch.testing.assert_close(log_alpha.detach()[inside], expected[inside], atol=1e-4, rtol=1e-4)
    probability = steering.gates.open_probability().detach()
    felt = sum(price * float(probability[kinds == KINDS.index(kind)].sum()) for kind, price in paid.items())
    assert float(steering.solved_penalty(1.0)) == pytest.approx(felt)
    assert float(steering.solved_penalty(0.0)) == 0.0


def test_with_adam_gates_keep_the_proportions_of_their_gradients_and_the_price_is_in_units_of_the_loss():
    steering = make_steering(budget=3)
    spread_(steering, 0, 2)
    parameter, optimizer, size = steering.gates.log_alpha, optimizer_of(steering), torch.logspace(-4, -1, 8)
    for _ in range(60):
        parameter.grad = -size.clone()
        before = parameter.detach().clone()
        optimizer.step()
        moved = parameter.detach() - before
        middle = parameter.detach().clamp(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT)
        steering.enforce_(0.5, optimizer)
    assert float(moved[7] / moved[6]) == pytest.approx(float(size[7] / size[6]), rel=0.05)
    second = optimizer.state[parameter]["exp_avg_sq"]
    assert torch.equal(second, second[:1].expand(8))
    rate = 0.05 / float(size.square().mean().sqrt())  # how far Adam with one second moment goes for a gradient of 1
    probability = open_probability(middle, Stretch(0.33))
    assert steering.budget_controller.price[0] > 0
    expected = middle - rate * steering.budget_controller.price[0] * probability * (1 - probability)
    torch.testing.assert_close(parameter.detach(), expected, atol=1e-3, rtol=1e-3)


def test_what_is_learned_tells_gates_that_closed_by_themselves_from_those_that_the_budget_closes():
    steering = make_steering(budget=3)
    found = steering.learned()
    assert (found["closed"], found["closed_by_gates"], found["price"]) == (5, 0, [])
    with torch.no_grad():
        steering.gates.log_alpha.copy_(torch.tensor([4.0, 4, 4, 2, 0, -3, -3, -3]))
    optimizer = optimizer_of(steering, torch.optim.SGD)
    for _ in range(2):
        steering.enforce_(1.0, optimizer)
    assert steering.learned()["price"] == [pytest.approx(sum(each[0] for each in steering.paid) / 2)]
    with torch.no_grad():
        steering.gates.log_alpha.copy_(torch.tensor([4.0, 4, 4, 2, 0, -3, -3, -3]))
    assert (steering.learned()["closed"], steering.learned()["closed_by_gates"]) == (5, 3)


@pytest.mark.parametrize(("settings", "ramp"), [({}, 0.0), ({"budget": None}, 1.0), ({"gate": "relaxed-top-k"}, 1.0)])
def test_no_price_is_taken_elsewhere(settings, ramp):
    steering = make_steering(**settings)
    before = spread_(steering).clone()
    steering.enforce_(ramp, optimizer_of(steering))
    assert torch.equal(steering.gates.log_alpha.detach(), before)


@pytest.mark.parametrize("budget", [3, {"encoder": 2, "cross": 5}])
def test_goals_of_every_family_and_mode(budget):
    final = [3] if budget == 3 else [2, 12, 5]
    whole = [32.0] if budget == 3 else [8.0, 12.0, 12.0]
    top_k = make_steering("marian", budget=budget, gate="straight-through-top-k")
    top_k.gates.mode = "open"
    assert top_k.goals(0.0) == whole
    top_k.gates.mode = "stochastic"
    for progress in (0.0, 0.5, 1.0):
        top_k.gates.learned.progress = progress
        values, kinds = top_k.gates.learned().detach(), top_k.gates.kind_index()
        counts = [float(values.sum())] if budget == 3 else [float(values[kinds == index].sum()) for index in range(3)]
        assert top_k.goals(progress) == counts
    assert counts == final
    clamped = make_steering("marian", budget=budget, gate="clamped-linear")
    assert clamped.goals(0.5) == final
    for steering in (top_k, clamped, make_steering("marian", budget=budget)):
        steering.gates.mode = "masked"
        assert steering.goals(0.0) == final
    assert make_steering("marian", budget=None).goals(0.5) == []


# -- what they leave -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["hard-concrete", "relaxed-top-k", "straight-through-top-k", "clamped-linear"])
def test_the_highest_gates_within_the_budget_stay(gate):
    steering = make_steering(gate=gate)
    log_alpha = spread_(steering)
    assert steering.learned_mask().nonzero().flatten().tolist() == sorted(log_alpha.argsort()[-3:].tolist())
    assert steering.budget_of(torch.ones(8)) == Budget(3, {})


def test_every_layer_keeps_its_minimum():
    steering = make_steering(budget=2, minimum_per_layer=1)
    with torch.no_grad():
        steering.gates.log_alpha.copy_(torch.arange(8.0))
    assert steering.learned_mask().tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert steering.mask_within(torch.arange(8.0, 0, -1), Budget(3, {})).tolist() == [1, 1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("gate", ["hard-concrete", "clamped-linear"])
@pytest.mark.parametrize("mode", ["open", "stochastic"])
def test_with_a_price_every_gate_above_0_stays(gate, mode):
    steering = make_steering(budget=None, gate=gate)
    spread_(steering)
    steering.gates.mode = mode
    mask = steering.learned_mask()
    assert steering.gates.mode == mode
    steering.gates.mode = "stochastic"
    assert torch.equal(mask.bool(), steering.gates.values() > 0)
    assert 0 < mask.sum() < 8
    assert steering.budget_of(mask) == Budget(int(mask.sum()), {})


def test_with_a_price_the_minimum_stays_all_the_same():
    steering = make_steering(budget=None, minimum_per_layer=2)
    with torch.no_grad():
        steering.gates.log_alpha.copy_(torch.tensor([-4.0, -3, -4, -3, 3, 3, 3, -4]))
    assert steering.learned_mask().tolist() == [0, 1, 0, 1, 1, 1, 0, 0]


def test_with_prices_of_kinds_the_others_stay_whole():
    steering = make_steering("marian", budget=None, price={"encoder": 0.5, "cross": 0.1})
    kinds = steering.gates.kind_index()
    with torch.no_grad():
        steering.gates.log_alpha[kinds == 0] = torch.linspace(-4, 3, 8)
        steering.gates.log_alpha[kinds == 2] = -4.0
    mask = steering.learned_mask()
    assert (mask[kinds == 1] == 1).all()
    assert (mask[kinds == 2] == 0).all()
    assert mask[kinds == 0].sum() == (steering.gates.values()[kinds == 0] > 0).sum()
    count = int(mask[kinds == 0].sum())
    assert 0 < count < 8
    assert steering.budget_of(mask).pruned(steering.gates.kind_sizes()) == {"encoder": count, "cross": 0}
    assert steering.budget_of(mask).per_kind == {"encoder": count, "decoder": 12, "cross": 0}
