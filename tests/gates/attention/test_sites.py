import pytest
import torch
import transformers as t
from torch import nn

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.surgery.remove import remove_heads_
from tests.gates import layouts
from tests.gates.attention.test_functional import wavlm
from tests.gates.kinds import seen_kinds
from tests.models import FAMILIES, build
from tools.coverage import architectures as zoo
from tools.coverage.checks import describe_kinds


@pytest.mark.parametrize("name", FAMILIES)
def test_every_site_is_found_once_with_its_kind_and_size(name):
    family, model = FAMILIES[name], build(name)
    sites = find_attention(model)
    assert describe_kinds(sites) == family.kinds
    assert sorted(f"{site.name}.{site.layout.output}" for site in sites) == sorted(family.output_paths)
    assert {site.heads for site in sites} == {4}
    assert {site.kv_heads for site in sites} == {family.kv_heads}
    assert {site.head_dim for site in sites} == {8}
    for kind in family.kinds:
        layers = [site.layer for site in sites if site.kind == kind]
        assert layers == list(range(len(layers)))


BUILT = {
    "FSMT": lambda: t.FSMTForConditionalGeneration(t.FSMTConfig(**layouts.TIME_FIRST)),
    "CLIPSeg text": lambda: t.CLIPSegTextModel(t.CLIPSegTextConfig(**layouts.TEXT)),
    "CLIP text": lambda: t.CLIPTextModel(t.CLIPTextConfig(**layouts.TEXT)),
    "bidirectional Gemma 3": lambda: t.Gemma3TextModel(
        t.Gemma3TextConfig(**layouts.TEXT, head_dim=8, num_key_value_heads=2, use_bidirectional_attention=True)
    ),
    "ImageGPT": lambda: t.ImageGPTModel(t.ImageGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=51, n_positions=48)),
    "BERT as a decoder": lambda: t.BertLMHeadModel(t.BertConfig(**layouts.TEXT, is_decoder=True)),
}


@pytest.mark.parametrize("name", BUILT)
def test_kinds_are_those_that_changed_tokens_show(name):
    """Attention that calls itself something else, or nothing at all: its kind is what it does."""
    torch.manual_seed(0)
    model, batch = zoo.randomise_(BUILT[name]()).eval(), {"input_ids": torch.tensor([[3, 9, 7, 5, 8, 4, 6, 2]])}
    if name == "FSMT":  # with a cache, it leaves its causal mask to the caller, who gives one token at a time
        batch |= {"decoder_input_ids": batch["input_ids"], "use_cache": False}
    sites = find_attention(model)
    assert seen_kinds(sites, lambda: model(**batch)) == [site.kind for site in sites]


def test_a_tower_is_not_taken_for_what_its_wrapper_masks():
    """Idefics makes causal masks for its text and none for its pictures, whose layers are no model of their own."""
    vision = {"embed_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 8}
    config = t.IdeficsConfig(**layouts.TEXT, vision_config={**vision, "patch_size": 4}, use_resampler=False)
    kinds = {site.name.split(".")[0]: site.kind for site in find_attention(t.IdeficsModel(config)) if site.kind != "cross"}
    assert kinds["vision_model"] == "encoder"
    assert kinds["layers"] == "decoder"


def test_lilt_has_two_streams_of_heads_in_each_layer():
    model = zoo.build(zoo.BY_NAME["Lilt"])
    attention = model.lilt.encoder.layer[0].attention
    text, layout = find_attention(model)[:2]
    assert (text.name.partition("layer.")[2], text.heads, text.head_dim) == ("0.attention", 4, 12)
    assert (layout.name.partition("layer.")[2], layout.heads, layout.head_dim) == ("0.attention.layout_output", 4, 6)
    assert (text.output, layout.output) == (attention.output.dense, attention.layout_output.dense)
    with pytest.raises(GateError, match="two streams"):
        remove_heads_(model, torch.ones(16))


def test_a_shared_module_counts_once():
    model = build("bert")
    layers = model.bert.encoder.layer
    layers[1] = layers[0]
    assert len(find_attention(model)) == 1


def test_a_model_without_attention_is_an_error_that_names_it():
    with pytest.raises(GateError, match="Sequential"):
        find_attention(nn.Sequential(nn.Linear(2, 2)))


def strange_in_part():
    """A BERT with a part of unknown structure beside one that the table describes."""

    class StrangeAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2, 2))

    model = build("bert")
    model.tower = StrangeAttention()
    return model


def test_a_model_known_in_part_is_gated_in_part_only_if_the_part_is_named():
    model = strange_in_part()
    with pytest.raises(GateError, match=r"StrangeAttention.*only="):
        HeadGates(model)
    gates = HeadGates(model, only="bert")
    assert {site.name for site in gates.sites} == {f"bert.encoder.layer.{layer}.attention" for layer in range(2)}
    batch = {"input_ids": torch.arange(3, 9)[None]}
    dense = model.eval()(**batch)[0]
    with gates.attached(), gates.use(torch.zeros(8)):
        assert not torch.equal(model(**batch)[0], dense)
    with pytest.raises(GateError, match="StrangeAttention"):
        remove_heads_(model, torch.ones(8))


def test_bloom_that_goes_round_its_output_projection_is_refused():
    config = t.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=20, pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(GateError, match="slow_but_exact"):
        find_attention(t.BloomForCausalLM(config))


def test_wavlm_is_gated_and_not_pruned_with_the_reason():
    model = wavlm()
    gates, sound = HeadGates(model), {"input_values": torch.randn(2, 80)}
    with torch.no_grad(), gates.attached():
        with gates.use(torch.ones(8)):
            dense = model(**sound)[0]
        with gates.use(torch.tensor([1.0, 0, 1, 1] + [1] * 4)):
            closed = model(**sound)[0]
        gates.detach()
        assert torch.equal(model(**sound)[0], dense)
        gates.sites[0].output.weight[:, 8:16] = 0
        torch.testing.assert_close(model(**sound)[0], closed)
    with pytest.raises(GateError, match="position biases has weights for each head"):
        remove_heads_(model, torch.ones(8))


@pytest.mark.parametrize("name", ["DiffLlama", "GPTBigCode"])
def test_look_alikes_of_known_layouts_are_not_pruned(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 20}
    bigcode = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 20, "n_positions": 16, "multi_query": False}
    config = t.DiffLlamaConfig(**sizes) if name == "DiffLlama" else t.GPTBigCodeConfig(**bigcode)
    model = getattr(t, f"{name}ForCausalLM")(config)
    assert find_attention(model)[0].gate_only
    with pytest.raises(GateError, match="gated but not removed"):
        remove_heads_(model, torch.ones(4))


@pytest.mark.parametrize("name", ["XLM", "Flaubert"])
def test_a_config_that_says_causal_makes_decoders(name):
    config, model = getattr(t, f"{name}Config"), getattr(t, f"{name}Model")
    size = {"emb_dim": 32, "n_layers": 1, "n_heads": 4, "n_words": 60}
    kinds = [find_attention(model(config(**size, causal=causal)))[0].kind for causal in (True, False)]
    assert kinds == ["decoder", "encoder"]
