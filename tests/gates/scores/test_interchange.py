import pytest
import torch

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import effects, given_replacement, interchange
from tests.models import build, inputs, logits, projection_inputs, replaced_heads

NAMES = ["bert", "llama", "marian"]


def batches(name):
    return inputs(name, padding=False), inputs(name, padding=False, seed=7)


def margin_of(values):
    return values.flatten(1)[:, 0] - values.flatten(1)[:, -1]


@pytest.mark.parametrize("name", NAMES)
def test_every_head_is_exchanged_alone(name):
    model, (batch, other) = build(name).eval(), batches(name)
    gates = HeadGates(model)
    outputs, of_other = list(projection_inputs(model, name, other).values()), logits(model, other)
    own = margin_of(logits(model, batch))
    found = interchange(gates, batch, other, lambda one: margin_of(logits(model, one)))
    for gate in range(gates.size):
        mask = torch.ones(gates.size).index_fill_(0, torch.tensor([gate]), 0.0)
        with replaced_heads(model, name, mask, lambda site, heads: outputs[site]):
            expected = own - margin_of(logits(model, batch))
        torch.testing.assert_close(found.moved[:, gate], expected.detach().double(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.apart, (own - margin_of(of_other)).detach().double())
    assert found.moved.abs().sum() > 0
    assert not gates.is_attached


def test_gates_and_model_are_as_they_were():
    model, (batch, other) = build("bert").train(), batches("bert")
    gates = HeadGates(model).attach()
    gates.set_mask_((torch.arange(gates.size) % 2).float())
    mask = gates.mask.clone()
    interchange(gates, batch, other, lambda one: margin_of(logits(model, one)))
    assert model.training
    assert gates.is_attached
    assert gates.mode == "masked"
    assert torch.equal(gates.mask, mask)


def test_a_batch_exchanged_with_itself_moves_nothing():
    model, (batch, _) = build("bert").eval(), batches("bert")
    found = interchange(HeadGates(model), batch, batch, lambda one: margin_of(logits(model, one)))
    assert float(found.moved.abs().max()) == 0
    with pytest.raises(GateError, match="lie 0 apart; expected more than 0"):
        effects(found.moved.sum(0), found.apart.sum())


def test_effects_are_a_ratio_of_sums():
    moved = torch.tensor([[1.0, 0.0], [2.0, 3.0]], dtype=torch.float64)
    assert effects(moved.sum(0), torch.tensor(6.0)).tolist() == [0.5, 0.5]


def test_outputs_of_another_shape_are_refused():
    model, (batch, _) = build("bert").eval(), batches("bert")
    gates, shorter = HeadGates(model), inputs("bert", padding=False, length=5)
    with pytest.raises(GateError, match=r"have the shape \[3, 7, 32\], but their replacement has \[3, 5, 32\]"):
        interchange(gates, batch, shorter, lambda one: margin_of(logits(model, one)))
    with pytest.raises(GateError, match="not attached"), given_replacement(gates, []):
        pass
    assert not gates.is_attached
