import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.budget import Budget, budget_mask, parse_prices, top_k_mask
from gates.errors import GateError
from gates.sites import KINDS

HEADS = {"encoder": 8, "decoder": 12, "cross": 12}
KIND_INDEX = torch.tensor([0] * 8 + [1] * 12 + [2] * 12)
THREE_LAYERS = {"kind_index": torch.zeros(12, dtype=torch.long), "layer_index": torch.arange(3).repeat_interleave(4)}


@pytest.mark.parametrize(("value", "total"), [(18, 18), (0, 0), (32, 32), (0.25, 8), (8.0, 8), (1, 1)])
def test_budgets_of_the_whole_model(value, total):
    assert Budget.parse(value, HEADS) == Budget(total, {})


def test_budgets_per_kind_leave_other_kinds_whole():
    budget = Budget.parse({"encoder": 2, "cross": 0.5}, HEADS)
    assert budget == Budget(20, {"encoder": 2, "decoder": 12, "cross": 6})


def test_a_mask_meets_a_budget_in_all_and_in_every_kind_that_has_a_number():
    mask = torch.zeros(32)
    mask[:4] = mask[8:12] = 1.0  # four of the encoder, four of the decoder
    for value, meets in ((8, True), (7, False), ({"encoder": 4, "decoder": 4, "cross": 0}, True), ({"encoder": 4}, False)):
        assert Budget.parse(value, HEADS).is_met(mask, KIND_INDEX) == meets
    assert not Budget.parse({"encoder": 3, "decoder": 5, "cross": 0}, HEADS).is_met(mask, KIND_INDEX)


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


@given(scores=st.lists(st.integers(-3, 3), min_size=12, max_size=12), budget=st.integers(0, 12))
@settings(deadline=None, max_examples=50)
def test_masks_hold_the_budget(scores, budget):
    mask = budget_mask(torch.tensor(scores, dtype=torch.float64), Budget(budget, {}), **THREE_LAYERS)
    assert mask.sum() == budget


def test_a_minimum_per_layer_is_kept():
    scores = torch.tensor([9.0] * 4 + [5.0] * 4 + [0.0, 0.1, 0.2, 0.3])
    mask = budget_mask(scores, Budget(5, {}), **THREE_LAYERS, minimum_per_layer=1)
    assert [int(part.sum()) for part in mask.split(4)] == [3, 1, 1]
    assert mask[11] == 1
    with pytest.raises(GateError, match="needs 6 heads"):
        budget_mask(scores, Budget(5, {}), **THREE_LAYERS, minimum_per_layer=2)


def test_a_minimum_per_layer_that_does_not_fit_into_the_budget_of_a_kind_names_it():
    kinds, layers = torch.tensor([0] * 4 + [1] * 4), torch.arange(4).repeat_interleave(2)
    budget = Budget.parse({KINDS[0]: 1}, {KINDS[0]: 4, KINDS[1]: 4})
    with pytest.raises(GateError, match=f"needs 2 {KINDS[0]} heads, more than the {KINDS[0]} budget of 1;"):
        budget_mask(torch.arange(8.0), budget, kind_index=kinds, layer_index=layers, minimum_per_layer=1)
