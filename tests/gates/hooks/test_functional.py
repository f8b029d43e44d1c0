"""Attention that hands its output projection's weight to a function: gated and removed as any other."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from gates.head_gates import HeadGates
from gates.hooks.functional import call_output


def attention(**more):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True, **more).eval()
    nn.init.normal_(module.in_proj_bias)
    nn.init.normal_(module.out_proj.bias)
    return module


def call(module, **more):
    generator = torch.Generator().manual_seed(1)
    states, probe = torch.randn(2, 5, 16, generator=generator), torch.randn(2, 3, 16, generator=generator)
    return module(probe, states, states, **more)


def test_the_projection_is_called_and_no_bit_changes():
    module, heads = attention(), []
    expected = call(module)
    handles = call_output(module)
    module.out_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    found = call(module)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert len(heads) == 1
    for handle in handles:
        handle.remove()
    call(module)
    assert len(heads) == 1


def test_pytorch_is_left_as_it_was_also_after_an_error():
    module = attention()
    before, fast = functional.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    call_output(module)
    with pytest.raises((RuntimeError, AssertionError)):
        module(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    assert functional.multi_head_attention_forward is before
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_a_second_observer_does_not_project_twice():
    module = attention()
    expected = call(module)[0]
    call_output(module)
    call_output(module)
    assert torch.equal(call(module)[0], expected)


@pytest.mark.parametrize("grad", [True, False])
def test_a_closed_head_is_a_block_of_zeros_within_pytorchs_own_encoder(grad):
    """The encoder layer has a fast path that does not call its attention; hooks keep it from it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 20, batch_first=True).eval()
    gates, states = HeadGates(layer), torch.randn(2, 5, 16)
    with torch.set_grad_enabled(grad):
        with gates.attached(), gates.use(torch.tensor([1.0, 0, 1, 1])):
            gated = layer(states)
        with torch.no_grad():
            layer.self_attn.out_proj.weight[:, 4:8] = 0
        torch.testing.assert_close(gated, layer(states))
