import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.budget import Budget, parse_prices, top_k_mask
from gates.errors import GateError
from gates.families.hard_concrete import LOG_ALPHA_LIMIT, HardConcrete, Stretch, open_probability
from gates.objective import TargetBudget, l0_penalty, project_to_budget

HEADS = {"encoder": 8, "decoder": 12, "cross": 12}
KIND_INDEX = torch.tensor([0] * 8 + [1] * 12 + [2] * 12)


@pytest.mark.parametrize(("value", "total"), [(18, 18), (0, 0), (32, 32), (0.25, 8), (8.0, 8), (1, 1)])
def test_budgets_of_the_whole_model(value, total):
    assert Budget.parse(value, HEADS) == Budget(total, {})


def test_budgets_per_kind_leave_other_kinds_whole():
    budget = Budget.parse({"encoder": 2, "cross": 0.5}, HEADS)
    assert budget == Budget(20, {"encoder": 2, "decoder": 12, "cross": 6})


@pytest.mark.parametrize("value", [-1, 33, 2.5, float("nan"), "many", True, float("inf"), 1.0, 0.001])
def test_impossible_budgets_name_the_value(value):
    with pytest.raises(GateError, match=str(value)):
        Budget.parse(value, HEADS)


def test_a_budget_for_a_kind_the_model_lacks():
    with pytest.raises(GateError, match=r"'cross'.*'encoder'"):
        Budget.parse({"cross": 2}, {"encoder": 8})


def test_prices_of_kinds():
    assert parse_prices(0.25, {"encoder": 8, "cross": 2}).tolist() == [0.25, 0.0, 0.25]
    assert parse_prices({"cross": 0.5}, HEADS).tolist() == [0.0, 0.0, 0.5]


@pytest.mark.parametrize("price", [-0.5, float("nan"), {"encoder": -0.5}])
def test_impossible_prices_are_named(price):
    with pytest.raises(GateError, match=r"price of encoder heads is (-0.5|nan)"):
        parse_prices(price, HEADS)


def test_a_price_for_a_kind_the_model_lacks():
    with pytest.raises(GateError, match=r"'cross'.*'encoder'"):
        parse_prices({"cross": 0.1}, {"encoder": 8})


@given(scores=st.lists(st.floats(-5, 5), min_size=32, max_size=32), budget=st.integers(0, 32))
@settings(deadline=None, max_examples=50)
def test_top_k_is_exact_and_best(scores, budget):
    scores = torch.tensor(scores)
    mask = top_k_mask(scores, Budget(budget, {}), KIND_INDEX)
    assert mask.sum() == budget
    if 0 < budget < 32:
        assert scores[mask == 1].min() >= scores[mask == 0].max()


@given(scores=st.lists(st.floats(-5, 5), min_size=32, max_size=32))
@settings(deadline=None, max_examples=30)
def test_top_k_per_kind_is_exact_in_each(scores):
    mask = top_k_mask(torch.tensor(scores), Budget(9, {"encoder": 1, "decoder": 0, "cross": 8}), KIND_INDEX)
    assert [int(mask[kind == KIND_INDEX].sum()) for kind in range(3)] == [1, 0, 8]


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
