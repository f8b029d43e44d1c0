"""Weights that several modules share, quantised weights, and weights that are not there."""

import pytest
import torch
from torch import nn

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.models import build, inputs, logits, masked
from tools.coverage import architectures as zoo

VALUES = torch.tensor([0.5, 1.0, 0.0, 0.25])
MASK = (VALUES > 0).float()
CLOSE = {"atol": 3e-6, "rtol": 1e-5}


def tied(name="bert"):
    """Both layers' output projections are modules of their own with one weight."""
    model = build(name)
    first, second = find_attention(model)
    second.output.weight = first.output.weight
    return model


def gated(model, gates, batch=None):
    return masked(model, gates, lambda: logits(model, inputs("bert") if batch is None else batch))


class Int8Linear(nn.Linear):
    """A linear layer with weights of eight bits, a scale per output, and perhaps a zero that is not 0."""

    def __init__(self, old, zero=0):
        super().__init__(old.in_features, old.out_features)
        self.zero = zero
        self.scale = (old.weight.abs().amax(1, keepdim=True) / 100).detach()
        whole = (old.weight / self.scale).round() + zero
        self.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
        self.bias = old.bias

    def forward(self, heads):
        return nn.functional.linear(heads, (self.weight.float() - self.zero) * self.scale, self.bias)


def quantised(**more):
    model = build("bert")
    for layer in model.bert.encoder.layer:
        layer.attention.output.dense = Int8Linear(layer.attention.output.dense, **more)
    return model


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model, before):
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


# -- shared ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_shared_weight_is_scaled_once(name):
    model, batch = tied(name), inputs(name)
    expected = gated(model, VALUES.repeat(2), batch)
    zero_heads_(model, MASK.repeat(2), values=VALUES.repeat(2))
    torch.testing.assert_close(logits(model, batch), expected, **CLOSE)
    first, second = find_attention(model)
    assert first.output.weight is second.output.weight


def test_a_module_of_all_layers_is_scaled_once():
    """ALBERT's one attention module is one site, however often it runs."""
    architecture = zoo.BY_NAME["Albert"]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    expected = gated(model, VALUES, batch)
    torch.testing.assert_close(logits(zero_heads_(model, MASK, values=VALUES), batch), expected, **CLOSE)


@pytest.mark.parametrize("gates", [torch.cat([VALUES, VALUES.flip(0)]), torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1])])
def test_different_gates_are_not_folded_into_a_shared_weight(gates):
    model = tied()
    before = weights(model)
    with pytest.raises(GateError, match=r"layer.1.attention' and '.*layer.0.attention' share the weights .* different"):
        zero_heads_(model, (gates > 0).float(), values=gates)
    assert_unchanged(model, before)


def test_gates_are_not_folded_into_a_weight_that_is_used_elsewhere():
    model = build("bert")
    find_attention(model)[0].module.self.query.weight = find_attention(model)[0].output.weight
    before = weights(model)
    with pytest.raises(GateError, match=r"shares its weights with Linear.weight, so gates cannot be folded"):
        zero_heads_(model, MASK.repeat(2))
    assert_unchanged(model, before)
    gates = torch.cat([torch.ones(4), VALUES])
    expected = gated(model, gates)
    torch.testing.assert_close(logits(zero_heads_(model, (gates > 0).float(), values=gates), inputs("bert")), expected, **CLOSE)


@pytest.mark.parametrize("gates", [torch.cat([VALUES, VALUES.flip(0)]), torch.tensor([0.5, 1, 0.25, 1, 1, 0.75, 1, 1])])
def test_removal_gives_each_site_a_weight_of_its_own(gates):
    """Also where no head goes and different gates are folded in."""
    model = tied()
    expected = gated(model, gates)
    remove_heads_(model, (gates > 0).float(), values=gates)
    torch.testing.assert_close(logits(model, inputs("bert")), expected, **CLOSE)


def test_gates_of_sites_with_one_output_module_are_refused():
    model = build("bert")
    first, second = model.bert.encoder.layer
    second.attention.output.dense = first.attention.output.dense
    gates = HeadGates(model)
    with pytest.raises(GateError, match="share one module as their output projection"):
        gates.attach()
    assert not gates.is_attached
    assert not first.attention.output.dense._forward_pre_hooks


# -- quantised -------------------------------------------------------------------------------------------------


def test_heads_of_a_quantised_projection_are_closed_exactly():
    model = quantised()
    expected = gated(model, MASK.repeat(2))
    zero_heads_(model, MASK.repeat(2))
    torch.testing.assert_close(logits(model, inputs("bert")), expected, **CLOSE)


@pytest.mark.parametrize(
    ("zero", "values", "said"),
    [
        (0, VALUES, r"holds Parameter of int8, so gates other than 0 and 1 cannot be folded into it; dequantise"),
        (7, MASK, r"holds Parameter of int8, whose zeros do not close a head; dequantise"),
    ],
)
def test_what_integers_cannot_hold_is_refused(zero, values, said):
    model = quantised(zero=zero)
    before = weights(model)
    with pytest.raises(GateError, match=said):
        zero_heads_(model, MASK.repeat(2), values=values.repeat(2))
    assert_unchanged(model, before)


def test_one_site_that_cannot_leaves_the_others_as_they_were():
    model = quantised()
    model.bert.encoder.layer[1].attention.output.dense.zero = 7
    before = weights(model)
    with pytest.raises(GateError, match=r"layer.1.attention' holds .* do not close a head"):
        zero_heads_(model, MASK.repeat(2))
    assert_unchanged(model, before)


def test_tensors_that_cannot_be_multiplied_are_refused():
    model = build("bert")
    projection = find_attention(model)[1].output
    projection.weight = nn.Parameter(projection.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(GateError, match=r"holds Parameter of float8_e4m3fn, in which heads cannot be closed \(.*dequantise"):
        zero_heads_(model, MASK.repeat(2))


def test_a_weight_that_is_computed_is_no_place_to_fold_into():
    model = build("bert")
    nn.utils.parametrizations.weight_norm(find_attention(model)[0].output)
    for change in (zero_heads_, remove_heads_):
        with pytest.raises(GateError, match="of float32"):
            change(model, MASK.repeat(2), values=VALUES.repeat(2))


def test_heads_are_not_removed_from_quantised_weights():
    model = quantised()
    before = weights(model)
    with pytest.raises(GateError, match=r"'output.dense' of '.*layer.0.attention' holds Parameter of int8, but removing"):
        remove_heads_(model, MASK.repeat(2))
    assert_unchanged(model, before)


# -- not there -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [zero_heads_, remove_heads_])
def test_weights_on_the_meta_device_are_refused(change):
    model = build("bert")
    model.bert.encoder.layer[1].attention.output.to("meta")
    with pytest.raises(GateError, match=r"'bert.encoder.layer.1.attention.output.dense.weight' .* is on the meta device"):
        change(model, MASK.repeat(2))
