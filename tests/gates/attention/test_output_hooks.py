import pytest
import torch

from gates.attention import output_hooks, sites
from gates.attention.intercept import observe_head_outputs
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from tests.models import build, inputs, logits
from tools.coverage import architectures as zoo


def test_a_head_is_never_gated_twice():
    model = build("bert")
    gates = HeadGates(model).attach()
    with pytest.raises(GateError, match="attached already"):
        gates.attach()


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


def test_attention_beside_the_gates_is_an_error_at_the_first_call(monkeypatch):
    """LiLT as it is without its own row in the table: a BERT whose layout stream nobody sees."""
    monkeypatch.setattr(sites, "LAYOUTS", tuple(layout for layout in sites.LAYOUTS if layout.second is None))
    architecture = zoo.BY_NAME["Lilt"]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    gates = HeadGates(model)
    assert gates.heads == 8
    with gates.attached(), torch.no_grad(), pytest.raises(GateError, match=r"LiltAttention.* bypasses the gates"):
        model(**batch)
    with torch.no_grad():
        model(**batch)  # nothing is left behind


def test_the_gates_are_probed_once_for_each_class(monkeypatch):
    calls = []
    monkeypatch.setattr(output_hooks, "is_bypassed", lambda module, gated, arguments: calls.append(type(module)) or False)
    model, batch = build("bert"), inputs("bert")
    gates = HeadGates(model).attach()
    for _ in range(2):
        logits(model, batch)
    assert len(calls) == 1
    gates.detach()
    logits(model, batch)
    with gates.attached():
        logits(model, batch)
    assert len(calls) == 1


def test_probing_changes_neither_outputs_nor_what_is_observed():
    model, batch = build("bert"), inputs("bert")
    expected = logits(model, batch)
    gates, seen = HeadGates(model), []
    with gates.attached(), observe_head_outputs(model, gates.sites, lambda site, heads: seen.append(heads)):
        gates.mode = "open"
        assert torch.equal(logits(model, batch), expected)
    assert len(seen) == len(gates.sites)
    assert all(heads.isfinite().all() for heads in seen)


def test_every_call_has_to_pass_the_output_projection():
    """Not the first one alone."""
    model = build("bert")
    attention = model.bert.encoder.layer[1].attention
    with HeadGates(model).attached():
        logits(model, inputs("bert"))
        attention.output.forward = lambda heads, residual: residual + heads @ attention.output.dense.weight.T
        with pytest.raises(GateError, match="bypasses its output projection"):
            logits(model, inputs("bert"))


@pytest.mark.integration
def test_a_model_that_was_compiled_and_called_before_has_its_gates_in_force():
    model, batch = build("bert"), inputs("bert")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        dense = compiled(**batch).logits
        gates = HeadGates(model).attach()
        gates.set_mask_(torch.zeros(8))
        closed = compiled(**batch).logits
        torch.testing.assert_close(closed, model(**batch).logits)
        assert not torch.allclose(closed, dense)
        gates.detach()
        torch.testing.assert_close(compiled(**batch).logits, dense)


def test_attached_restores_after_an_exception():
    model = build("bert")
    gates = HeadGates(model)
    with pytest.raises(RuntimeError, match="inside"), gates.attached():
        raise RuntimeError("inside")
    assert not gates.is_attached
