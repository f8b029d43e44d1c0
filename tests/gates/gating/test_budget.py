import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.attention.sites import KINDS
from gates.errors import GateError
from gates.gating.budget import Budget, budget_mask, check_mask, mask_within, parse_prices, top_k_mask
from gates.gating.latency import LatencyTable, SiteTimes, TimeLimit
from tests.gates.latency_tables import all_masks, drawn_table

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


@pytest.mark.parametrize(("read", "named"), [(Budget.parse, "budget"), (parse_prices, "price")])
def test_what_names_no_kind_is_refused(read, named):
    with pytest.raises(GateError, match=rf"the {named} is {{}}, which names no kind of heads; .* such as {{encoder: [\d.]+}}"):
        read({}, HEADS)


def test_prices_of_kinds():
    assert parse_prices(0.25, {"encoder": 8, "cross": 2}).tolist() == [0.25, 0.0, 0.25]
    assert parse_prices({"cross": 0.5}, HEADS).tolist() == [0.0, 0.0, 0.5]
    assert parse_prices(0, HEADS).tolist() == [0.0] * 3
    assert parse_prices(1, HEADS).dtype == torch.float32


@pytest.mark.parametrize("read", [Budget.parse, parse_prices])
def test_a_kind_that_the_model_lacks_is_named(read):
    with pytest.raises(GateError, match=r"'cross'.*'encoder'"):
        read({"cross": 1}, {"encoder": 8})


@pytest.mark.parametrize("price", [-0.5, float("nan"), {"encoder": -0.5}])
def test_impossible_prices_are_named(price):
    with pytest.raises(GateError, match=r"price of encoder heads is (-0.5|nan)"):
        parse_prices(price, HEADS)


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


def test_a_minimum_per_layer_is_kept():
    scores = torch.tensor([9.0] * 4 + [5.0] * 4 + [0.0, 0.1, 0.2, 0.3])
    mask = budget_mask(scores, Budget(5, {}), **THREE_LAYERS, minimum_per_layer=1)
    assert [int(part.sum()) for part in mask.split(4)] == [3, 1, 1]
    assert mask[11] == 1
    with pytest.raises(GateError, match="needs 6 heads"):
        budget_mask(scores, Budget(5, {}), **THREE_LAYERS, minimum_per_layer=2)


def test_a_minimum_that_no_layer_has_is_refused():
    """Layers of one head and of three: the smaller gives all that it has."""
    layers = {"kind_index": torch.zeros(4), "layer_index": torch.tensor([0, 1, 1, 1])}
    assert budget_mask(torch.arange(4.0), Budget(4, {}), **layers, minimum_per_layer=3).tolist() == [1, 1, 1, 1]
    with pytest.raises(GateError, match="a minimum of 4 heads in each layer is more than any layer has; give at most 3"):
        budget_mask(torch.arange(4.0), Budget(4, {}), **layers, minimum_per_layer=4)


def test_kinds_that_a_budget_leaves_whole_are_not_pruned():
    assert Budget.parse({"encoder": 2, "cross": 12}, HEADS).pruned(HEADS) == {"encoder": 2}
    assert Budget.parse(8, HEADS).pruned(HEADS) == {}


def test_a_fraction_keeps_at_least_one_head_or_is_refused():
    """Of 32 heads, 1/64 is half a head, which rounds to none; 0 asks for none outright."""
    for value in (1 / 64, 0.01, -0.01):
        with pytest.raises(GateError, match=f"the budget is {value}"):
            Budget.parse(value, HEADS)
    assert Budget.parse(0.04, HEADS).total == 1
    assert Budget.parse(0.0, HEADS).total == 0
    with pytest.raises(GateError, match="expected a whole number from 0 to 32"):
        Budget.parse(-0.01, HEADS)


@pytest.mark.parametrize("minimum", [0, 1])
def test_ties_go_to_the_earlier_head(minimum):
    """Also among many, where a sort that is not told to be stable mixes them up."""
    kinds, layers = torch.zeros(200, dtype=torch.long), torch.arange(200) % 2
    for scores in (torch.ones(200), torch.arange(200) % 3):
        mask = budget_mask(scores, Budget(50, {}), kind_index=kinds, layer_index=layers, minimum_per_layer=minimum)
        kept = sorted(sorted(range(200), key=lambda head, scores=scores: -float(scores[head]))[:50])
        assert mask.nonzero().flatten().tolist() == kept


def test_a_minimum_takes_the_earlier_of_equal_heads():
    layers = torch.arange(2).repeat_interleave(100)
    scores = torch.tensor([9.0] * 100 + [1.0] * 100)
    mask = budget_mask(scores, Budget(12, {}), kind_index=torch.zeros(200), layer_index=layers, minimum_per_layer=5)
    assert mask.nonzero().flatten().tolist() == [*range(7), *range(100, 105)]


def test_scores_are_read_only():
    scores = torch.arange(12, dtype=torch.float64)
    budget_mask(scores, Budget(6, {}), **THREE_LAYERS, minimum_per_layer=1)
    assert torch.equal(scores, torch.arange(12, dtype=torch.float64))


def test_a_mask_is_where_its_scores_are():
    """The meta device stands for any that is not the processor."""
    scores, kinds = torch.empty(32, device="meta"), KIND_INDEX.to("meta")
    assert top_k_mask(scores, Budget(9, {"encoder": 1, "decoder": 0, "cross": 8}), kinds).device.type == "meta"


def test_the_kind_that_lacks_heads_is_named_where_the_total_suffices():
    """Four layers need four heads, just as many as there are; but two of them are of a kind of which one stays."""
    kinds, layers = torch.tensor([0] * 4 + [1] * 6), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    budget = Budget.parse({KINDS[0]: 1, KINDS[1]: 4}, {KINDS[0]: 4, KINDS[1]: 6})
    with pytest.raises(GateError, match=f"needs 2 {KINDS[0]} heads, more than the {KINDS[0]} budget of 1;"):
        budget_mask(torch.arange(10.0), budget, kind_index=kinds, layer_index=layers, minimum_per_layer=1)


def test_scores_that_are_no_numbers_rank_nothing():
    with pytest.raises(GateError, match="the score of head 1 is nan, so heads cannot be ranked"):
        top_k_mask(torch.tensor([0.3, float("nan"), 0.9]), Budget(1, {}), kind_index=torch.zeros(3))


@pytest.mark.parametrize("seed", range(8))
def test_a_mask_within_a_time_is_the_first_of_all_such_masks_in_the_order_of_the_ranking(seed):
    table = drawn_table(seed)
    scores = torch.rand(8, generator=torch.Generator().manual_seed(seed))
    order = scores.argsort(descending=True)
    for limit in (
        TimeLimit(table.least, table),
        TimeLimit((table.least + table.dense) / 2, table),
        TimeLimit(table.dense, table),
    ):
        within = [mask for mask, counts in all_masks(table) if table.time_of(counts) <= limit.milliseconds]
        best = max(within, key=lambda mask: mask[order].tolist())
        budget = Budget.parse(limit, {"encoder": 8})
        mask = top_k_mask(scores, budget, torch.zeros(8))
        assert torch.equal(mask, best)
        assert budget.is_met(mask, torch.zeros(8))
        assert int(mask.sum()) <= budget.total == limit.most


def test_equal_scores_within_a_time_go_to_the_earlier_head():
    table = LatencyTable(0.0, (SiteTimes("encoder.0", (0.0, 1.0, 2.0)), SiteTimes("encoder.1", (0.0, 1.0, 2.0))))
    assert mask_within(torch.zeros(4), TimeLimit(3.0, table)).tolist() == [1, 1, 1, 0]


def test_a_minimum_per_layer_counts_within_a_time_too():
    table = LatencyTable(0.0, (SiteTimes("encoder.0", (0.0, 1.0, 2.0)), SiteTimes("encoder.1", (0.0, 2.0, 4.0))))
    layers, scores = torch.tensor([0, 0, 1, 1]), torch.tensor([0.9, 0.8, 0.1, 0.2])

    def found(milliseconds):
        budget = Budget.parse(TimeLimit(milliseconds, table), {"encoder": 4})
        return budget_mask(scores, budget, kind_index=torch.zeros(4), layer_index=layers, minimum_per_layer=1).tolist()

    assert found(3.0) == [1, 0, 0, 1]
    assert found(4.0) == [1, 1, 0, 1]
    with pytest.raises(GateError, match=r"a minimum of 1 heads in each layer takes 3 ms, more than the budget of 2\.5 ms"):
        found(2.5)


def test_a_text_is_no_budget_without_a_table():
    with pytest.raises(GateError, match="measure it first"):
        Budget.parse("12ms", {"encoder": 8})
    with pytest.raises(GateError, match="expected a number of heads"):
        Budget.parse("many", {"encoder": 8})


def test_the_terms_of_budgets_differ_where_masks_may():
    table, other = drawn_table(0), drawn_table(1)
    terms = [
        Budget(3, {}).terms,
        Budget(3, {"encoder": 3}).terms,
        *(Budget.parse(TimeLimit(limit, of), {}).terms for limit, of in ((4.0, table), (5.0, table), (4.0, other))),
    ]
    assert all(one not in terms[:index] for index, one in enumerate(terms))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.ones(7), r"the mask has shape \[7\]; this model has 8 groups to gate"),
        ([1, 0, 1, 0, 1, 0, 1, 0], "the mask is a list; expected a tensor with 0 or 1 for each of 8 groups"),
        (torch.ones(8, 1), r"the mask has shape \[8, 1\]; this model has 8 groups to gate"),
        (torch.tensor([1.0, 0, 1, 0, 1, 0, 0.5, 2]), "the mask has 0.5 for group 6; expected 0"),
        (torch.tensor([1.0, 0, 1, 0, 1, 0, 1, torch.nan]), "the mask has nan for group 7"),
        (torch.full((8,), -1), "the mask has -1 for group 0"),
    ],
)
def test_what_is_no_mask(mask, expected):
    with pytest.raises(GateError, match=expected):
        check_mask(mask, 8, "group")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16])
def test_a_mask_of_any_type(dtype):
    check_mask(torch.tensor([1, 0, 1]).to(dtype), 3)
    check_mask(torch.empty(3, dtype=dtype, device="meta"), 3)


@given(scores=st.lists(st.integers(-3, 3), min_size=12, max_size=12), budget=st.integers(0, 12))
@settings(deadline=None, max_examples=50)
def test_masks_hold_the_budget(scores, budget):
    mask = budget_mask(torch.tensor(scores, dtype=torch.float64), Budget(budget, {}), **THREE_LAYERS)
    assert mask.sum() == budget
