"""Heads found by running a model: where the table knows them, the probe finds the same."""

import copy

import pytest
import torch
import transformers as t
from torch import nn
from torch.nn import functional

from gates.attention.probing import PROBED, probe_attention
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.importance import head_gradients
from gates.surgery.remove import remove_heads_
from tests.models import slope
from tools.coverage import architectures as zoo
from tools.coverage.tiny import tiny_models


@pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2", "T5", "DistilBert", "Bloom", "Falcon (new decoder)"])
def test_the_probe_finds_what_the_table_says(name, monkeypatch):
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    expected = [(site.name, site.layout.output, site.kind, site.heads, site.head_dim) for site in find_attention(model)]
    monkeypatch.setattr("gates.attention.sites._match", lambda module: None)
    state = torch.get_rng_state()
    found = probe_attention(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert [(site.name, site.layout.output, site.kind, site.heads, site.head_dim) for site in found] == expected
    assert {site.gate_only for site in found} == {PROBED}


def zaya():
    """Attention whose queries, keys and values pass through convolutions, which no row describes."""
    return next(tiny_models("zaya")), {"input_ids": torch.randint(3, 50, (3, 7), generator=torch.Generator().manual_seed(1))}


def test_heads_found_by_a_probe_are_gated_and_scored_and_not_removed():
    model, batch = zaya()
    with pytest.raises(GateError, match=r"ZayaAttention.*probe_attention"):
        HeadGates(model)
    gates = HeadGates(model, sites=probe_attention(model, batch)).eval()
    assert [site.name for site in gates.sites] == ["layers.0.self_attn", "layers.1.self_attn"]

    def losses():
        return model(**batch)[0].double().square().flatten(1).mean(1)

    rows = head_gradients(gates, losses)
    torch.testing.assert_close(rows[:, 5].double(), slope(gates, 5, losses, 0.005), rtol=0.02, atol=1e-3)
    with pytest.raises(GateError, match="unknown structure"):
        remove_heads_(model, torch.ones(8))


def test_heads_that_are_nowhere_side_by_side_are_refused():
    config = t.XLNetConfig(d_model=32, n_layer=1, n_head=4, d_inner=40, vocab_size=20)
    model, softmax = t.XLNetModel(config), functional.softmax
    with pytest.raises(GateError, match=r"XLNetRelativeAttention at 'layer\.0\.rel_attn' has its 4 heads side by side"):
        probe_attention(model, {"input_ids": torch.arange(3, 9)[None]})
    assert functional.softmax is softmax
    assert nn.Linear(2, 2)._forward_pre_hooks == {}


def test_attention_that_the_inputs_do_not_reach_is_refused():
    model, batch = zaya()
    model.unused = copy.deepcopy(model.layers[0].self_attn)
    with pytest.raises(GateError, match="ZayaAttention at 'unused' computed no attention with several heads"):
        probe_attention(model, batch)
