import pytest
import torch

from gates.errors import GateError
from gates.head_gates import HeadGates
from tests.models import build, inputs, logits


def test_detach_leaves_no_trace():
    model, batch = build("bert"), inputs("bert")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    expected = logits(model, batch)
    gates = HeadGates(model).attach()
    gates.set_mask_(torch.zeros(gates.heads))
    assert not torch.allclose(logits(model, batch), expected)
    gates.detach()
    assert torch.equal(logits(model, batch), expected)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert not module._forward_pre_hooks
    assert not gates.is_attached


def test_attached_restores_after_an_exception():
    model = build("bert")
    gates = HeadGates(model)
    with pytest.raises(RuntimeError, match="inside"), gates.attached():
        raise RuntimeError("inside")
    assert not gates.is_attached


def test_a_head_is_never_gated_twice():
    model = build("bert")
    gates = HeadGates(model).attach()
    with pytest.raises(GateError, match="attached already"):
        gates.attach()
    with pytest.raises(GateError, match="other gates"):
        HeadGates(model).attach()


def test_unreached_sites_are_named():
    model, batch = build("marian"), inputs("marian")
    gates = HeadGates(model).attach()
    assert len(gates.unreached()) == len(gates.sites)
    with torch.no_grad():
        model.get_encoder()(batch["input_ids"])
    assert gates.unreached()
    assert not any(".encoder." in name for name in gates.unreached())
    logits(model, batch)
    assert gates.unreached() == []


def test_attention_that_goes_round_its_output_projection_is_an_error():
    model = build("bert")
    attention = model.bert.encoder.layer[1].attention
    attention.output.forward = lambda heads, residual: residual + heads @ attention.output.dense.weight.T
    gates = HeadGates(model)
    with gates.attached(), pytest.raises(GateError, match=r"encoder\.layer\.1.*goes round its output projection"):
        logits(model, inputs("bert"))
