"""Relevance is conserved in every family that it is claimed for, at every layer, and the model computes what it did before."""

import re

import pytest
import torch
import transformers as t
from torch import nn

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.relevance.heads import FAMILIES, check_family, head_steps, top_logits, writes
from gates.relevance.rules import following_rules
from tests.gates.relevance.models import NAMES, T5, build, inputs
from tests.models import with_large_weights


def test_every_family_that_is_claimed_is_tested():
    assert list(FAMILIES) == NAMES
    assert [build(name).config.model_type for name in NAMES] == NAMES


def run(name, *, epsilon=1e-6):
    model = build(name)
    batch = inputs(model, padding=not (model.can_generate() and not writes(model)))
    batch = {key: tensor.requires_grad_() if tensor.is_floating_point() else tensor for key, tensor in batch.items()}
    sites, hidden = find_attention(model), []
    layers = {re.match(r"(.*?\.\d+)(?=\.|$)", site.name).group(1) for site in sites}

    def see(module, args, output):
        """An alias of the layer's output, whose hooks come before those of the rules."""
        state = output[0] if isinstance(output, tuple) else output
        hidden.append(state.view_as(state))
        return (hidden[-1], *output[1:]) if isinstance(output, tuple) else hidden[-1]

    handles = [
        model.get_submodule(layer).register_forward_hook(see)
        for layer in layers
        if "decoder" not in layer or not writes(model)  # beside a decoder's layers, relevance flows into the encoder
    ]
    with following_rules(model, sites, epsilon=epsilon) as graph:
        output = model(**batch, **({"use_cache": False} if model.can_generate() else {}))
    for handle in handles:
        handle.remove()
    return model, batch, output, hidden, graph


@pytest.mark.parametrize("name", NAMES)
def test_relevance_is_conserved_at_every_layer(name):
    model, batch, output, hidden, graph = run(name)
    with torch.no_grad():
        torch.testing.assert_close(output.logits, model(**batch).logits, rtol=1e-4, atol=1e-5)
    predictions = top_logits(model, batch, output)
    logit = predictions.logits[:, 0].sum()
    leaves = [*graph.inputs, *(tensor for tensor in batch.values() if tensor.requires_grad)]
    arrived, cuts = [], []

    def at_leaf(leaf):
        return lambda gradient: arrived.append(float((leaf.detach() * gradient).sum()))

    def at_layer(activation):
        def see(gradient):
            absorbed = sum(float(value) for value in graph.rules.absorbed.values())
            cuts.append(float((activation * gradient).sum()) + absorbed + sum(arrived))

        return see

    for leaf in leaves:
        leaf.register_hook(at_leaf(leaf))
    for activation in hidden:
        activation.register_hook(at_layer(activation.detach()))
    assert len(hidden) >= 2
    torch.autograd.grad(logit, leaves, allow_unused=True)
    logit = float(logit.detach())
    absorbed = {kind: float(value) for kind, value in graph.rules.absorbed.items()}
    assert sum(arrived) + sum(absorbed.values()) == pytest.approx(logit, rel=1e-4)
    assert len(cuts) == len(hidden)
    assert cuts == pytest.approx([logit] * len(cuts), rel=1e-4)
    assert abs(absorbed["epsilon"]) < 1e-3 * abs(logit)
    assert abs(absorbed["softmax"]) > 1e-6
    assert arrived


def test_without_what_was_absorbed_it_would_not_be_conserved():
    """The ledger is no slack: it is most of what the inputs lack."""
    model = build("bart")
    (step, *_) = head_steps(model, find_attention(model), inputs(model))
    assert step.error < 1e-6
    assert abs(step.inputs - step.logit) > 0.1 * abs(step.logit)


@pytest.mark.parametrize("activation", ["relu", "gated-gelu", "gated-silu"])
def test_gated_feed_forward_layers_conserve_relevance(activation):
    torch.manual_seed(0)
    config = t.T5Config(feed_forward_proj=activation, **T5)
    model = with_large_weights(t.T5ForConditionalGeneration(config)).double()
    for step in head_steps(model, find_attention(model), inputs(model)):
        assert step.error < 1e-4 * abs(step.logit)


def test_parameters_modes_and_hooks_are_as_before():
    model = build("llama").train()
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    before = model.config._attn_implementation
    with following_rules(model, find_attention(model)):
        model(torch.tensor([[3, 4, 5]]), use_cache=False)
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert model.config._attn_implementation == before
    assert model.training


def test_a_family_that_is_not_claimed_is_refused():
    model = t.XLNetForSequenceClassification(t.XLNetConfig(d_model=32, n_layer=1, n_head=4, d_inner=40, vocab_size=50))
    with pytest.raises(GateError, match="relevance does not support models of type 'xlnet'"):
        check_family(model)
    with pytest.raises(GateError, match="type 'Linear'"):
        check_family(nn.Linear(2, 2))
    with pytest.raises(GateError, match=r"model\.float\(\)"):
        check_family(build("bert").half())


def test_relevance_that_is_lost_is_noticed(monkeypatch):
    model = build("bert")
    rules = "gates.relevance.rules.Rules.softmax"
    monkeypatch.setattr(rules, lambda self, inputs, output, dim: output)  # keeps no books
    with pytest.raises(GateError, match="relevance is not conserved in BertForSequenceClassification"):
        next(head_steps(model, find_attention(model), inputs(model)))
