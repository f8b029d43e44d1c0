"""What holds for every family of gates."""

from typing import get_args

import pytest
import torch

from gates.errors import GateError
from gates.gating.budget import Budget, top_k_mask
from gates.gating.hard_concrete import annealed, uniform_noise
from gates.gating.head_gates import HeadGates
from gates.options import TOP_K_FAMILIES, GateFamily
from tests.models import build, inputs, logits

FAMILIES = get_args(GateFamily)


def gates_of(family, *, model="bert", budget=3, spread=True):
    gates = HeadGates(build(model), family=family, budget=budget if family in TOP_K_FAMILIES else None)
    if spread:
        with torch.no_grad():
            gates.log_alpha.copy_(torch.linspace(-1.5, 1.5, gates.size)[torch.randperm(gates.size)])
    return gates


def test_temperatures_go_down_by_equal_factors():
    assert [annealed(10.0, 0.1, progress) for progress in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([10, 10**0.5, 1, 0.1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_interface(family):
    learned = gates_of(family).learned
    assert [name for name, _ in learned.named_parameters()] == list(learned.state_dict()) == ["log_alpha"]
    for progress in (0.0, 0.5, 1.0):
        learned.progress = progress
        assert learned.train()().shape == (8,)
        several = learned(torch.Generator().manual_seed(0), draws=5)
        assert several.shape == (5, 8)
        assert several.dtype == torch.float32
        assert bool(((several >= 0) & (several <= 1)).all())
        assert torch.equal(several, learned(torch.Generator().manual_seed(0), draws=5))
        fixed = learned.eval()()
        assert torch.equal(fixed, learned(draws=5))
        assert torch.equal(fixed, learned())
        (gradient,) = torch.autograd.grad((learned.train()(draws=5) * torch.arange(8.0)).sum(), learned.log_alpha)
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any())
        expected = learned.open_probability()
        assert bool(((expected >= 0) & (expected <= 1)).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_gates_are_computed_in_float32(family):
    half, single = gates_of(family).learned.to(torch.bfloat16), gates_of(family).learned
    with torch.no_grad():
        single.log_alpha.copy_(half.log_alpha)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = single(torch.Generator().manual_seed(0))
    for training in (True, False):
        found, expected = (gates.train(training)(torch.Generator().manual_seed(0)) for gates in (half, single))
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
        assert torch.equal(under_autocast, expected) or not training
    assert torch.equal(half.open_probability(), single.open_probability())


@pytest.mark.parametrize("family", FAMILIES)
def test_reset_brings_back_the_start(family):
    fresh, used = gates_of(family, spread=False), gates_of(family)
    assert not torch.equal(used.log_alpha, fresh.log_alpha)
    used.learned.reset_()
    assert torch.equal(used.log_alpha, fresh.log_alpha)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_start_without_a_budget_leaves_a_model_as_it_is(family):
    model, batch = build("bert"), inputs("bert")
    expected = logits(model, batch)
    gates = HeadGates(model, family=family).attach().eval()
    assert torch.equal(logits(model, batch), expected)
    if family in TOP_K_FAMILIES:
        gates.train()
        torch.testing.assert_close(logits(model, batch), expected)


@pytest.mark.parametrize("family", TOP_K_FAMILIES)
@pytest.mark.parametrize("budget", [5, {"encoder": 2, "cross": 0.5}])
def test_in_evaluation_a_top_k_family_is_the_mask_of_its_budget(family, budget):
    gates = gates_of(family, model="marian", budget=budget)
    expected = top_k_mask(gates.log_alpha.detach(), Budget.parse(budget, gates.kind_sizes()), gates.kind_index())
    assert torch.equal(gates.values(), expected)
    assert torch.equal(gates.learned.eval()(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_one_family_loads_into_every_other(family):
    state = gates_of(family).state_dict()
    for other in FAMILIES:
        gates = gates_of(other)
        gates.load_state_dict(state)
        assert torch.equal(gates.log_alpha, state["learned.log_alpha"])


def test_what_families_do_not_have_is_refused():
    with pytest.raises(GateError, match="clamped-linear gates take no budget, but 3 is given"):
        HeadGates(build("bert"), family="clamped-linear", budget=3)
    with pytest.raises(GateError, match="the gate family is 'soft'"):
        HeadGates(build("bert"), family="soft")
    with pytest.raises(GateError, match="the budget is 99"):
        HeadGates(build("bert"), family="relaxed-top-k", budget=99)


def test_noise_stays_inside_the_unit_interval(monkeypatch):
    """At the ends of what PyTorch draws, 0 and the last number below 1, it is a millionth away from 0 and 1."""
    ends = torch.tensor([0.0, 1 - 2**-24])
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high, **more: ends * (high - low) + low)
    noise = uniform_noise(torch.zeros(2))
    assert noise.tolist() == pytest.approx([1e-6, 1 - 1e-6], abs=1e-7)
    assert noise.min() > 0
    assert noise.max() < 1


def test_noise_is_drawn_where_the_gates_are():
    assert uniform_noise(torch.empty(3, device="meta"), draws=2).device.type == "meta"
