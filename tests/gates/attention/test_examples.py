import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from gates.attention.examples import MIXED, UNKNOWN, ExampleAxis, axes_of, collect, count_examples, locate, only_axis, replaced
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from tests.gates import layouts
from tests.models import build, inputs, logits, values_of_a_call

ALL = pytest.mark.parametrize("name", layouts.MODELS)
AXES = st.builds(ExampleAxis, axis=st.integers(0, 2), fold=st.integers(1, 3), interleaved=st.booleans())


# -- where examples are, without a model -------------------------------------------------------------------------


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_every_row_is_located_in_whatever_order_they_are(rows):
    numbers = torch.tensor(rows)
    (found,) = locate(lambda group: [group[numbers]], examples=9)
    assert found.tolist() == rows


def test_rows_that_nobody_or_several_touch_are_told_apart():
    def touched(group):
        return [torch.tensor([bool(group[2]), False, bool(group[0] | group[3])])]

    assert locate(touched, examples=4)[0].tolist() == [2, UNKNOWN, MIXED]


@given(AXES, st.integers(2, 5), st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_values_reach_the_rows_of_their_example_and_sums_come_back(axis, examples, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [2, 3, 4]
    sizes[axis.axis] = examples * axis.fold
    values = torch.randn(examples, 5, generator=generator)
    folded = axis.folded(values)
    rows = folded.view(*axis.sizes(len(folded), dimensions=4), 5).expand(*sizes, 5)
    for row, number in enumerate(axis.numbers(examples).tolist()):
        assert bool((rows.select(axis.axis, row) == values[number]).all())
    weights = torch.randn(*sizes, 5, generator=generator)
    expected = torch.zeros(examples, 5)
    for row, number in enumerate(axis.numbers(examples).tolist()):
        expected[number] += weights.select(axis.axis, row).flatten(0, -2).sum(0)
    torch.testing.assert_close(axis.collect(weights, examples), expected, atol=1e-5, rtol=1e-5)
    shape = [-1 if own == axis.axis else 1 for own in range(3)]
    numbers = axis.numbers(examples).view(shape).expand(sizes)
    torch.testing.assert_close(collect(weights, numbers, examples), expected, atol=1e-5, rtol=1e-5)
    assert ExampleAxis(axis.axis, axis.fold, axis.interleaved and axis.fold > 1) in axes_of(numbers, examples)


def test_only_what_is_known_speaks_against_an_axis():
    square = torch.full((2, 2), UNKNOWN)
    assert axes_of(square, 2) == [ExampleAxis(0, 1, False), ExampleAxis(1, 1, False)]
    square[0, 1] = 0
    assert axes_of(square, 2) == [ExampleAxis(0, 1, False)]
    square[1, 1] = 0
    assert axes_of(square, 2) == []


@pytest.mark.parametrize(
    ("shape", "axis"), [((3, 7, 8), 0), ((7, 3, 8), None), ((3, 6, 8), None), ((6, 7, 8), None), ((3, 8), 0)]
)
def test_a_size_of_the_first_axis_that_no_other_could_have_is_enough(shape, axis):
    """Another axis of this size may be that of positions."""
    assert only_axis(shape, examples=3) == (None if axis is None else ExampleAxis(axis, 1, False))


def test_the_first_example_outside_a_group_takes_the_place_of_all_in_it():
    given = ({"a": torch.arange(3), "b": [torch.arange(6).view(3, 2), "text"]}, torch.zeros(1, 3), torch.tensor(4.0))
    found = replaced(given, torch.tensor([True, False, True]))
    assert found[0]["a"].tolist() == [1, 1, 1]
    assert found[0]["b"][0].tolist() == [[2, 3]] * 3
    assert found[0]["b"][1] == "text"
    assert found[1].shape == (1, 3)
    assert found[2] == 4


# -- gates per example against one example at a time -------------------------------------------------------------


@ALL
def test_a_draw_per_example_equals_example_by_example(name):
    model, batch = layouts.make(name)
    examples = len(next(iter(batch.values())))
    gates = HeadGates(model, draw_per="example", initial_log_alpha=0.3).attach().train()
    for again in range(2):  # with the axes unknown and known
        gates.generator = torch.Generator().manual_seed(again)
        with torch.no_grad():
            together = layouts.output(model, batch)
        values = gates.learned(torch.Generator().manual_seed(again), draws=examples).detach()
        for row in range(examples):
            with torch.no_grad(), gates.use(values[row]):
                alone = layouts.output(model, layouts.one(batch, row))
            torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5 * float(alone.abs().max()), rtol=1e-4)
    assert (values[0] != values[1]).any()


def test_finding_out_takes_no_noise_and_leaves_the_modes():
    model, batch = layouts.make("square")
    model.train()
    model.bert.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    gates = HeadGates(model, draw_per="example", initial_log_alpha=0.3).attach().train()
    found = []
    for _ in range(2):  # with the axes unknown and known
        torch.manual_seed(3)
        found.append((layouts.output(model, batch), torch.rand(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert gates.unreached() == []
    assert [module.training for module in model.modules()] == modes


def test_examples_that_do_not_differ_in_a_square_batch_are_refused():
    model, _ = layouts.make("square")
    gates = HeadGates(model, draw_per="example").attach().train()
    with pytest.raises(GateError, match=r"\[4, 4, 32\].*ambiguous for 4 examples.*draw_per='batch'"):
        model(input_ids=layouts.ids(1, 4).expand(4, 4))
    model(input_ids=layouts.ids(1, 4).expand(3, 4))  # three of four rows can only be the first axis
    model(**layouts.MODELS["square"][1]())
    model(input_ids=layouts.ids(1, 4).expand(4, 4))  # known by now
    assert gates.is_attached


def test_a_cache_is_not_filled_to_find_out():
    model = build("llama")
    HeadGates(model, draw_per="example").attach().train()
    batch = {"input_ids": inputs("llama", batch=4, length=4, padding=False)["input_ids"]}
    with pytest.raises(GateError, match="without a cache"):
        model(**batch, past_key_values=DynamicCache(config=model.config))
    model(**batch)
    cache = DynamicCache(config=model.config)
    model(**batch, past_key_values=cache)
    assert cache.get_seq_length() == 4


# -- the number of examples --------------------------------------------------------------------------------------


def test_the_order_of_keywords_does_not_matter():
    model, batch = build("bert"), inputs("bert", padding=False)
    positions = torch.arange(7).unsqueeze(0)
    gates = HeadGates(model, initial_log_alpha=0.3, draw_per="example").attach().train()
    found = []
    for named in ({"position_ids": positions, **batch}, {**batch, "position_ids": positions}):
        gates.generator = torch.Generator().manual_seed(0)
        drawn = values_of_a_call(gates, lambda named=named: found.append(logits(model, named)))
        assert drawn.shape == (3, 8)
    gates.generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found.append(model(batch["input_ids"], None, None, positions).logits)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], found[0])


def test_inputs_that_do_not_say_how_many_examples_there_are_are_refused():
    assert count_examples({"position_ids": torch.zeros(1, 7), "inputs_embeds": torch.zeros(5, 7, 2)}) == 5
    assert count_examples({"x": torch.zeros(4), "y": torch.zeros(4, 2), "scale": torch.tensor(1.0), "flag": True}) == 4
    with pytest.raises(GateError, match=r"'x': 4, 'y': 1.*draw_per='batch'"):
        count_examples({"x": torch.zeros(4), "y": torch.zeros(1, 4)})
    with pytest.raises(GateError, match="none"):
        count_examples({})
