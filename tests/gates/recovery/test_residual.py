import pytest
import torch
import transformers as t
from torch import nn
from transformers.pytorch_utils import Conv1D

from gates.recovery.residual import watch_writers
from tests.models import build, inputs, logits

SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}


def projections_of(model, ending=("",)):
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.endswith(tuple(ending))
    }


def outputs_of(model, ending):
    """What modules give, in the order in which they run."""
    found = []

    def take(module, args, output):
        found.append(output[0] if isinstance(output, tuple) else output)

    for name, module in model.named_modules():
        if name.endswith(ending):
            module.register_forward_hook(take)
    return found


@torch.no_grad()
def test_before_a_norm_the_sum_is_what_goes_on():
    model = build("llama").eval()
    layers = outputs_of(model, ("layers.0", "layers.1"))
    with watch_writers(projections_of(model, ["o_proj", "down_proj"])) as calls:
        logits(model, inputs("llama"))
    assert [call.name.split(".")[-1] for call in calls] == ["o_proj", "down_proj"] * 2
    attention, mlp = calls[0], calls[1]
    torch.testing.assert_close(attention.stream + attention.output, mlp.stream)
    for layer, call in zip(layers, calls[1::2], strict=True):
        torch.testing.assert_close(call.stream + call.output, layer)


@torch.no_grad()
def test_behind_a_norm_the_sum_is_what_is_normed():
    model = build("bert").eval()
    given = outputs_of(model, ("attention.output", "0.output", "1.output"))
    with watch_writers(projections_of(model, ["output.dense"])) as calls:
        logits(model, inputs("bert"))
    for call, output in zip(calls, given, strict=True):
        norm = model.get_submodule(call.name.replace("dense", "LayerNorm"))
        torch.testing.assert_close(norm(call.stream + call.output), output)


@pytest.mark.parametrize(
    ("model", "ending"),
    [
        (lambda: t.GPTJModel(t.GPTJConfig(**SIZES, rotary_dim=4)), ("attn.out_proj", "mlp.fc_out")),
        (
            lambda: t.FalconModel(
                t.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=60, parallel_attn=True)
            ),
            ("self_attention.dense", "mlp.dense_4h_to_h"),
        ),
    ],
)
@torch.no_grad()
def test_side_by_side_the_stream_is_all_but_the_own_output(model, ending):
    torch.manual_seed(0)
    model = model().eval()
    layers = outputs_of(model, ("h.0", "h.1"))
    with watch_writers(projections_of(model, ending)) as calls:
        model(torch.randint(60, (2, 5)))
    assert len(calls) == 4
    for index, call in enumerate(calls):
        torch.testing.assert_close(call.stream + call.output, layers[index // 2])


@torch.no_grad()
def test_terms_of_an_activation_are_no_stream():
    """GPT-2's activation adds powers of what a projection gives."""
    torch.manual_seed(0)
    model = t.GPT2Model(t.GPT2Config(**SIZES)).eval()
    with watch_writers(projections_of(model)) as calls:
        model(torch.randint(60, (2, 5)))
    written = {call.name.split(".", 2)[-1]: call.stream is not None for call in calls}
    assert written == {"attn.c_attn": False, "attn.c_proj": True, "mlp.c_fc": False, "mlp.c_proj": True}


@torch.no_grad()
def test_a_norm_in_between_leaves_no_stream():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 60}
    model = t.Gemma2Model(t.Gemma2Config(**sizes, num_key_value_heads=2, head_dim=8)).eval()
    with watch_writers(projections_of(model, ["o_proj", "down_proj"])) as calls:
        model(torch.randint(3, 60, (2, 5)))
    assert [call.stream for call in calls] == [None, None]


@torch.no_grad()
def test_the_pass_ends_where_enough_is_seen():
    model = build("llama").eval()
    layers = outputs_of(model, ("layers.0", "layers.1"))
    with watch_writers({"first": model.model.layers[0].self_attn.o_proj}, enough={"first": (1, 1)}) as calls:
        logits(model, inputs("llama"))
        raise AssertionError("the pass went on")
    assert calls[0].stream is not None
    assert layers == []
    assert not model.model.layers[0].self_attn.o_proj._forward_hooks


def test_other_errors_come_through():
    model = build("llama").eval()
    with pytest.raises(ZeroDivisionError), watch_writers(projections_of(model, ["o_proj"]), enough={"none": (1, 1)}):
        raise ZeroDivisionError


@torch.no_grad()
def test_one_after_the_other_added_to_the_same_stream():
    """Cohere computes both outputs first and adds them to the residual stream one by one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 60}
    model = t.CohereModel(t.CohereConfig(**sizes)).eval()
    layers = outputs_of(model, ("layers.0", "layers.1"))
    with watch_writers(projections_of(model, ["o_proj", "down_proj"])) as calls:
        model(torch.randint(6, 60, (2, 5)))
    assert len(calls) == 4
    for attention, mlp, layer in zip(calls[::2], calls[1::2], layers, strict=True):
        torch.testing.assert_close(attention.stream + attention.output + mlp.output, layer)
        torch.testing.assert_close(mlp.stream + mlp.output, layer)
