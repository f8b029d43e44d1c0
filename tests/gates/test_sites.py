import pytest
import torch
import transformers as t
from torch import nn

from gates.errors import GateError
from gates.sites import describe_kinds, find_attention
from gates.surgery.remove import remove_heads_
from tests.models import FAMILIES, build


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


def test_kinds_of_an_encoder_decoder_follow_its_modules():
    kinds = {site.name: site.kind for site in find_attention(build("marian"))}
    assert kinds["model.encoder.layers.1.self_attn"] == "encoder"
    assert kinds["model.decoder.layers.2.self_attn"] == "decoder"
    assert kinds["model.decoder.layers.2.encoder_attn"] == "cross"


def test_gpt2_with_cross_attention():
    config = t.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=20, n_positions=16, add_cross_attention=True)
    sites = find_attention(t.GPT2LMHeadModel(config))
    assert [(site.kind, site.heads, site.kv_heads) for site in sites] == [("decoder", 4, 4), ("cross", 4, 4)]


def test_a_shared_module_counts_once():
    model = build("bert")
    layers = model.bert.encoder.layer
    layers[1] = layers[0]
    assert len(find_attention(model)) == 1


def test_a_model_without_attention_is_an_error_that_names_it():
    with pytest.raises(GateError, match="Sequential"):
        find_attention(nn.Sequential(nn.Linear(2, 2)))


def test_unknown_attention_is_an_error_that_names_its_class():
    with pytest.raises(GateError, match="MultiheadAttention"):
        find_attention(nn.TransformerEncoderLayer(16, 2))


def test_a_partly_known_model_is_an_error():
    class StrangeAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2, 2))

    model = build("bert")
    model.bert.encoder.layer[1].attention = StrangeAttention()
    with pytest.raises(GateError, match="StrangeAttention"):
        find_attention(model)


def test_bloom_that_goes_round_its_output_projection_is_refused():
    config = t.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=20, pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(GateError, match="slow_but_exact"):
        find_attention(t.BloomForCausalLM(config))


def test_wavlm_is_refused_with_the_reason():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
    sound = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (4,)}
    config = t.WavLMConfig(**sizes, **sound, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    with pytest.raises(GateError, match="round its output projection"):
        find_attention(t.WavLMModel(config))


@pytest.mark.parametrize("name", ["DiffLlama", "GPTBigCode"])
def test_look_alikes_of_known_layouts_are_not_pruned(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 20}
    bigcode = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 20, "n_positions": 16, "multi_query": False}
    config = t.DiffLlamaConfig(**sizes) if name == "DiffLlama" else t.GPTBigCodeConfig(**bigcode)
    model = getattr(t, f"{name}ForCausalLM")(config)
    assert find_attention(model)[0].gate_only
    with pytest.raises(GateError, match="gated but not removed"):
        remove_heads_(model, torch.ones(4))
