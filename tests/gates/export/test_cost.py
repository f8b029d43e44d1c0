import copy

import pytest
import torch
import transformers
from torch import nn

from gates.attention.inputs import example_inputs, resized
from gates.export import cost
from gates.export.cost import count_flops, count_parameters, hardware, measure_cost, measure_latency
from gates.surgery.remove import remove_heads_
from tests.models import build

LENGTH = 9


def bert_flops(heads_by_layer):
    """Two operations per multiplication of the matrix products, written down from the architecture."""
    total = 2 * 32 * 32 + 2 * 32 * 2  # pooler and classifier see one token
    for heads in heads_by_layer:
        width = 8 * heads
        total += 2 * LENGTH * 32 * width * 4  # query, key, value, output
        total += 2 * heads * LENGTH * LENGTH * 8 * 2  # scores and weighted sum
        total += 2 * LENGTH * 32 * 40 * 2  # feed-forward
    return total


@pytest.mark.parametrize("kept", [(4, 4), (0, 3), (1, 0)])
def test_flops_are_those_of_the_matrix_products(kept):
    model = build("bert")
    mask = torch.cat([torch.tensor([1.0] * heads + [0.0] * (4 - heads)) for heads in kept])
    remove_heads_(model, mask)
    assert count_flops(model, example_inputs(model, batch=1, length=LENGTH)) == bert_flops(kept)


def test_flops_grow_with_the_batch():
    model = build("bert")
    one, three = (count_flops(model, example_inputs(model, batch=batch, length=LENGTH)) for batch in (1, 3))
    assert three == 3 * one


def test_shared_parameters_count_once():
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False))
    assert count_parameters(model) == 30
    model[1].weight = model[0].weight
    assert count_parameters(model) == 15


class Clock:
    """A clock that stands still, except while a model runs."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(cost, "time", clock := Clock())
    return clock


class Taking(nn.Module):
    """Takes its time, and notes what it was called with."""

    def __init__(self, name, seconds, calls, clock):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.name, self.seconds, self.calls, self.clock = name, seconds, calls, clock

    def forward(self, x):
        self.calls.append((self.name, len(x), self.training))
        self.clock.now += self.seconds * len(x)


def test_latency_by_batch_size_with_both_models_in_turns(clock):
    calls = []
    slow, fast = Taking("slow", 0.03, calls, clock), Taking("fast", 0.005, calls, clock)
    found = measure_latency(slow, fast, {"x": torch.zeros(2, 4)}, batch_sizes=[1, 5], repeats=6, warm_up=2)
    assert [row.batch_size for row in found] == [1, 5]
    for row in found:
        assert row.dense_ms == pytest.approx(30 * row.batch_size)
        assert row.pruned_ms == pytest.approx(5 * row.batch_size)
        assert row.ratio == pytest.approx(6)
    turns = ["slow", "fast"] * 2 + ["slow", "fast", "fast", "slow"] * 3
    assert calls == [(name, size, False) for size in (1, 5) for name in turns]
    assert slow.training  # left as they were
    assert fast.training


@pytest.mark.parametrize(("seconds", "pairs"), [(0.3, 8), (0.1, 4)])
def test_a_slow_model_is_measured_less_often_but_four_times(clock, seconds, pairs):
    calls = []
    model = Taking("slow", 0.02, calls, clock)
    measure_latency(model, model, {"x": torch.zeros(1, 1)}, batch_sizes=[1], repeats=500, warm_up=0, seconds=seconds)
    assert len(calls) == 2 * pairs


def test_cost_of_a_pruned_model():
    model = build("bert")
    cut = remove_heads_(copy.deepcopy(model), torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]))
    found = measure_cost(model, cut, example_inputs(model, batch=2, length=LENGTH), batch_sizes=[2])
    head = 3 * (8 * 32 + 8) + 8 * 32
    assert found.dense_parameters - found.pruned_parameters == 7 * head
    assert (found.dense_flops, found.pruned_flops) == (bert_flops((4, 4)), bert_flops((1, 0)))
    assert found.flop_ratio == pytest.approx(bert_flops((4, 4)) / bert_flops((1, 0)))
    assert found.shapes["input_ids"] == (1, LENGTH)
    assert found.hardware == hardware(torch.device("cpu"))
    assert str(torch.get_num_threads()) in found.hardware
    assert found.versions["transformers"] == transformers.__version__


def test_resized_inputs_repeat_or_lose_rows_and_columns():
    inputs = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1], [1, 1, 1]])}
    found = resized(inputs, 3, 2)
    assert found["input_ids"].tolist() == [[1, 2], [4, 5], [1, 2]]
    assert found["attention_mask"].tolist() == [[1, 1], [1, 1], [1, 1]]  # no row is masked as a whole
    assert resized(inputs, 1, 5)["input_ids"].tolist() == [[1, 2, 3, 1, 2]]
    assert resized({"pixel_values": torch.zeros(2, 3, 4, 4)}, 5, 9)["pixel_values"].shape == (5, 3, 4, 4)
