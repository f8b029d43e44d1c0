"""Examples counted while a model runs in every way that the project runs one."""

import copy

import pytest
import torch
from transformers import SwinConfig, SwinModel

from gates.gating.head_gates import HeadGates
from gates.recovery.refit import refit_
from tests.models import build, inputs
from training.runs.cost import Cost, ExampleCounter


def counter_of(name="bert"):
    model = build(name).eval()
    gates = HeadGates(model)
    return model, gates, ExampleCounter(gates)


def counts(counter):
    return pytest.approx(counter.forward), pytest.approx(counter.backward)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "marian", "vit"])
def test_an_example_counts_once_forward_and_once_more_where_a_gradient_goes_back(name):
    model, gates, counter = counter_of(name)
    batch = inputs(name)
    rows = len(next(iter(batch.values())))
    with torch.no_grad():
        model(**batch)
    assert (counter.forward, counter.backward) == (pytest.approx(rows), 0)
    with gates.attached():
        model(**batch)
    assert (counter.forward, counter.backward) == (pytest.approx(2 * rows), pytest.approx(rows))
    counter.stop()
    model(**batch)
    assert counter.forward == pytest.approx(2 * rows)


def test_windows_of_a_picture_are_one_example():
    size = {"image_size": 16, "patch_size": 2, "num_channels": 3, "embed_dim": 16, "window_size": 2}
    model = SwinModel(SwinConfig(depths=[2], num_heads=[2], **size)).eval()
    counter = ExampleCounter(HeadGates(model))
    model(torch.randn(3, 3, 16, 16))
    assert counter.forward == pytest.approx(3)


def test_gradients_of_gates_alone_count_too():
    """With weights at rest nothing before the first gate needs a gradient."""
    model, gates, counter = counter_of()
    model.requires_grad_(False)
    gates.mode = "stochastic"
    with gates.attached():
        model(**inputs("bert"))
    assert counter.backward == counter.forward > 0


def test_a_pass_that_ends_early_counts_in_part():
    model, _, counter = counter_of()
    batch = inputs("bert")
    rows = len(next(iter(batch.values())))

    def stop(*_):
        raise StopIteration

    second = model.get_submodule("bert.encoder.layer.1")
    handle = second.register_forward_pre_hook(stop)
    with pytest.raises(StopIteration):
        model(**batch)
    handle.remove()
    assert counter.forward == pytest.approx(rows / 2)
    with torch.no_grad():
        second(torch.zeros(7, 3, 32))  # enters behind the first layer, with other rows
    assert counter.forward == pytest.approx(rows / 2 + 7 / 2)


def test_a_refit_that_enters_again_costs_a_few_passes_and_one_without_states_many():
    found = {}
    for keep in (True, False):
        model, gates, counter = counter_of()
        batch = inputs("bert")
        mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 0, 1])
        refit_(
            gates, mask, lambda batch=batch: [batch], lambda one, model=model: model(**one), lambda one: {}, keep_states=keep
        )
        found[keep] = counter.forward / len(next(iter(batch.values())))
    assert 2 < found[True] < found[False]


def test_a_copy_of_the_model_is_not_counted():
    model, _, counter = counter_of()
    other = copy.deepcopy(model)
    other(**inputs("bert"))
    assert counter.forward == 0
    model(**inputs("bert"))
    assert counter.forward > 0


def test_costs_add_up():
    first, second = Cost(1.0, 300.0, 2, 10.0, 5.0), Cost(2.0, None, 3, 1.0, 1.0)
    assert first.then(second) == Cost(3.0, 300.0, 5, 11.0, 6.0)
    assert Cost.of({"steps": 4, "seconds": 1.0, "peak_memory_mb": None, "test_accuracy": 0.5}) == Cost(1.0, None, 4)
    assert Cost.of(first.as_row()) == first
    assert first.with_teacher() == Cost(1.0, 300.0, 2, 15.0, 5.0)
