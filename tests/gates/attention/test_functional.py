"""Attention that hands its output projection's weight to a function: gated and removed as any other."""

import copy
import pickle
import threading

import pytest
import torch
import transformers as t
from torch import nn
from torch.nn import functional

from gates.attention.own_method import call_output
from gates.gating.head_gates import HeadGates


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


def wavlm():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    sound = {"conv_dim": (16,), "conv_kernel": (4,), "conv_stride": (2,), "num_feat_extract_layers": 1}
    config = t.WavLMConfig(**sizes, **sound, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    return t.WavLMModel(config).eval()


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # Transformers' call of PyTorch
def test_wavlm_projects_itself_and_no_bit_changes():
    model, sound, masks = wavlm(), torch.randn(2, 40), torch.ones(2, 40, dtype=torch.long)
    masks[1, 20:] = 0
    with torch.no_grad():
        expected = model(sound, attention_mask=masks, output_attentions=True)
        with HeadGates(model).attached() as gates, gates.use(torch.ones(8)):
            found = model(sound, attention_mask=masks, output_attentions=True)
    assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        assert torch.equal(one, other)
    assert all("torch_multi_head_self_attention" not in vars(part) for part in model.modules())


@pytest.mark.parametrize("kind", ["multihead", "wavlm"])
def test_an_interrupt_leaves_pytorch_as_it_was(kind):
    module, other = (attention() if kind == "multihead" else wavlm()), attention()
    before, fast, expected = functional.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled(), call(other)[0]

    def interrupt(*_):
        raise KeyboardInterrupt

    parts = [part for part in module.modules() if call_output(part)]
    parts[0].out_proj.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        call(module) if kind == "multihead" else module(torch.randn(1, 40))
    assert functional.multi_head_attention_forward is before
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert torch.equal(call(other)[0], expected)


def test_another_thread_computes_with_its_own_modules_alone():
    """While one module is inside its output projection, another thread runs an ungated module to its end."""
    module, other, found = attention(), attention(), []
    expected = call(other)[0]

    def meanwhile(*_):
        thread = threading.Thread(target=lambda: found.append(call(other)[0]))
        thread.start()
        thread.join()

    handles = call_output(module)
    module.out_proj.register_forward_pre_hook(meanwhile)
    other.out_proj.register_forward_pre_hook(lambda *_: found.append("projected"))
    call(module)
    assert len(found) == 1
    assert torch.equal(found[0], expected)
    for handle in handles:
        handle.remove()
    assert "forward" not in vars(module)


def test_users_may_leave_in_any_order():
    module = attention()
    first, second = call_output(module), call_output(module)
    first[0].remove()
    first[0].remove()
    assert "forward" in vars(module)
    second[0].remove()
    assert "forward" not in vars(module)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_calls_its_own_projection(copied):
    module = attention()
    call_output(module)
    other = copied(module)
    with torch.no_grad():
        other.out_proj.bias.add_(1.0)
    torch.testing.assert_close(call(other)[0], call(module)[0] + 1)


@pytest.mark.parametrize("options", [{"batch_first": False}, {"kdim": 16, "vdim": 8}, {"add_bias_kv": True, "bias": False}])
@pytest.mark.parametrize("grad", [True, False])
def test_every_kind_of_multihead_attention_is_computed_to_the_last_bit(options, grad):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, **({"batch_first": True} | options)).train()
    query, key, value = torch.randn(5, 5, 16), torch.randn(5, 5, 16), torch.randn(5, 5, options.get("vdim", 16))
    masks = {"attn_mask": torch.ones(5, 5).triu(1).bool(), "key_padding_mask": torch.arange(5).expand(5, 5) > 3}
    found = []
    for _ in range(2):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=not grad):
            found.append([*module(query, key, value, **masks), *module(query[0], key[0], value[0], need_weights=False)])
        call_output(module)
    assert all(one is other is None or torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.integration
def test_gates_hold_in_compiled_code():
    torch.manual_seed(0)
    model, states = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 20, batch_first=True)).eval(), torch.randn(2, 5, 16)
    with HeadGates(model).attached() as gates, gates.use(torch.tensor([1.0, 0, 1, 1])):
        expected = model(states)
        torch.testing.assert_close(torch.compile(model, backend="eager")(states), expected)
