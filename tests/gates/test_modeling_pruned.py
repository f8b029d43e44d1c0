"""Models with layers that lost all heads, where others look at them: recorded attentions, adapters, continuous batching."""

import copy

import pytest
import torch
import transformers
from torch import nn

from gates.attention.sites import find_attention
from gates.export.checkpoint import load_pruned, own_auto_class, save_pruned
from gates.gating.head_gates import HeadGates
from gates.modeling_pruned import Bias
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.gates.chosen import architectures
from tests.models import build as build_family
from tests.models import inputs as family_inputs
from tools.coverage import architectures as zoo

QUICK = ("Bert", "Llama", "T5", "Bart", "GPTJ", "Albert")


def half_of_the_layers(model):
    """A mask without the heads of every second site and without the first head of the others."""
    heads = [site.heads for site in find_attention(model)]
    parts = [torch.zeros(count) if place % 2 == 0 else torch.ones(count) for place, count in enumerate(heads)]
    for part in parts[1::2]:
        part[0] = 0
    return torch.cat(parts)


@pytest.mark.parametrize("name", architectures(("Bert", "Llama", "T5"), QUICK, only=lambda row: not row.gate_only))
@torch.no_grad()
def test_a_layer_without_heads_keeps_its_place_among_the_attentions(name):
    """``[batch, 0, query, key]`` in its place; the others are those of the model with zeroed heads."""
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    for part in model.modules():  # set_attn_implementation does not reach the stacks of T5 in every version
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    mask = half_of_the_layers(model)
    zeroed, pruned = zero_heads_(copy.deepcopy(model), mask), remove_heads_(copy.deepcopy(model), mask)
    recorded, places = 0, 0
    expected, found = zeroed(**batch, output_attentions=True), pruned(**batch, output_attentions=True)
    for key in (key for key, value in expected.items() if "attentions" in key and value is not None):
        assert len(found[key]) == len(expected[key]), key
        for left, right in zip(expected[key], found[key], strict=True):
            assert (right.shape[0], *right.shape[2:]) == (left.shape[0], *left.shape[2:])
            places += right.shape[1] == 0
            recorded += 1
            if right.shape[1]:
                kept = left[:, 1:] if right.shape[1] < left.shape[1] else left
                torch.testing.assert_close(right, kept, atol=1e-5, rtol=1e-4)
    assert recorded == 0 or places
    assert recorded or architecture.name in ("CLIP",)  # it hands its towers' attentions on in their own outputs


def test_attentions_recorded_before_heads_are_removed_stay_in_place():
    """Transformers puts its recording hooks on the modules that are there at the first request."""
    model, batch = build_family("llama"), family_inputs("llama")
    model.set_attn_implementation("eager")
    model(**batch, output_attentions=True)
    pruned = remove_heads_(model, torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1]))
    for again in (pruned, copy.deepcopy(pruned)):
        assert [attention.shape[1] for attention in again(**batch, output_attentions=True).attentions] == [0, 4]


def test_attentions_grow_with_the_cache():
    model = build_family("llama")
    model.set_attn_implementation("eager")
    pruned = remove_heads_(model, torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1]))
    ids = torch.tensor([[3, 4, 5]])
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "output_attentions": True}
    steps = pruned.generate(ids, **options, return_dict_in_generate=True).attentions
    for empty, full in steps:
        assert empty.shape[1] == 0
        assert empty.shape[2:] == full.shape[2:]


def test_a_bias_is_a_linear_layer_of_no_features(tmp_path):
    """What finds layers by their type, as LoRA does, can wrap it; its empty weight is saved, for a stock class to refuse."""
    model = build_family("bert")
    pruned = remove_heads_(copy.deepcopy(model), half_of_the_layers(model))
    (bias,) = (module for module in pruned.modules() if isinstance(module, Bias))
    assert isinstance(bias, nn.Linear)
    assert (bias.in_features, bias.out_features, tuple(bias.weight.shape)) == (0, 32, (32, 0))
    torch.testing.assert_close(bias(torch.zeros(2, 3, 0)), bias.bias.expand(2, 3, 32))
    save_pruned(model, tmp_path / "out", half_of_the_layers(model), tokenizer=None)
    assert pruned.state_dict().keys() == load_pruned(tmp_path / "out").state_dict().keys()
    assert [name for name, tensor in pruned.state_dict().items() if tensor.numel() == 0] == [
        "bert.encoder.layer.0.attention.output.dense.weight"
    ]


def no_heads_in(model, sites):
    """A mask that drops all heads of these sites, and no others."""
    heads = [site.heads for site in find_attention(model)]
    return torch.cat([torch.full((count,), float(place not in sites)) for place, count in enumerate(heads)])


@pytest.mark.integration
@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "Albert", "GPT2"])
@torch.no_grad()
def test_an_export_whose_cut_layers_are_all_empty(tmp_path, name):
    """Its stock class would draw new weights for them and refuses it; by either way it loads, is gated and saved again."""
    architecture = zoo.BY_NAME[name]
    model, batch = zoo.build(architecture), zoo.inputs(architecture)
    sites = len(find_attention(model))
    mask = no_heads_in(model, range(1, sites) if sites > 1 else [0])
    save_pruned(model, tmp_path / "out", mask, check_batch=batch, tokenizer=None)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path / "out")
    auto = getattr(transformers, own_auto_class(model))
    loaded = [load_pruned(tmp_path / "out").eval(), auto.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()]
    outputs = [again(**batch)[0] for again in loaded]
    torch.testing.assert_close(outputs[0], outputs[1])
    if sites == 1:
        return
    fewer = torch.ones(find_attention(model)[0].heads)
    fewer[0] = 0
    for place, again in enumerate(loaded):
        gates = HeadGates(again)
        assert gates.sizes == [len(fewer)]
        with gates.attached(), gates.use(fewer):
            expected = again(**batch)[0]
        folder = save_pruned(again, tmp_path / f"again{place}", fewer, check_batch=batch, tokenizer=None)
        torch.testing.assert_close(load_pruned(folder).eval()(**batch)[0], expected, atol=1e-5, rtol=1e-4)
        assert f"model = {auto.__name__}.from_pretrained(" in (folder / "README.md").read_text()


@pytest.mark.filterwarnings("ignore")  # PEFT warns of much, and PyTorch of an adapter that reads no features
@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_lora_on_all_linear_layers(name):
    """An adapter on the bias adds nothing, and merging gives the same outputs."""
    peft = pytest.importorskip("peft")
    architecture = zoo.BY_NAME[name]
    model = zoo.build(architecture)
    pruned = remove_heads_(model, half_of_the_layers(model))
    adapted = peft.get_peft_model(pruned, peft.LoraConfig(target_modules="all-linear", r=2)).eval()
    with torch.no_grad():
        before = adapted(**zoo.inputs(architecture))[0]
        for parameter in adapted.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter) * parameter.requires_grad)
        after = adapted(**zoo.inputs(architecture))[0]
        merged = adapted.merge_and_unload()(**zoo.inputs(architecture))[0]
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(merged, after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0] * 2])
def test_continuous_batching_is_refused_before_it_starts(tmp_path, mask):
    """Its cache has the config's number of key/value heads in every layer, and its thread would fail on others and not end."""
    model = build_family("llama")
    save_pruned(model, tmp_path / "out", torch.tensor(mask).float(), tokenizer=None)
    pruned = remove_heads_(model, torch.tensor(mask).float())
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    for refusing in (pruned, copy.deepcopy(pruned), load_pruned(tmp_path / "out"), auto):
        with pytest.raises(ValueError, match=r"continuous batching .*; use generate\(\)"):
            refusing.generate_batch(inputs=[[3, 4, 5]])
        with pytest.raises(ValueError, match="continuous batching"):
            refusing.init_continuous_batching()


def test_continuous_batching_is_open_to_equal_key_value_heads():
    pruned = remove_heads_(build_family("llama"), torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0]))
    assert {site.kv_heads for site in find_attention(pruned)} == {2}
    assert pruned.init_continuous_batching.__func__ is type(pruned).init_continuous_batching
