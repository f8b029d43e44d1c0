"""Bytes of the key/value cache per token, against the caches that models make."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from gates.export.cost import measure_cost
from gates.export.kv_cache import cache_bytes, cache_bytes_of
from gates.sites import find_attention
from gates.surgery.remove import remove_heads_
from tests.models import build
from training.tasks import from_config

GROUPS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
}  # fmt: skip
MODELS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": GROUPS,
    "qwen3": GROUPS | {"head_dim": 16},
    "phi3": GROUPS | {"pad_token_id": 0},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}
MASKS = ([1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 1, 0, 1, 1])


def stored(model, length):
    """Bytes of the cache behind so many tokens."""
    with torch.no_grad():
        layers = model(input_ids=torch.arange(length)[None] + 1, use_cache=True).past_key_values.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_the_cache_grows_by_with_a_token(name, dtype):
    model = from_config(AutoModelForCausalLM, {"model_type": name, "vocab_size": 50, **MODELS[name]}).to(dtype).eval()
    for mask in map(torch.tensor, MASKS):
        cut = remove_heads_(copy.deepcopy(model), mask.float())
        grown = stored(cut, 8) - stored(cut, 7)
        assert cache_bytes_of(model, mask.float()) == cache_bytes_of(cut) == grown


def test_whole_groups_shrink_it_and_single_heads_of_groups_do_not():
    """The reason for gates on groups."""
    model = from_config(AutoModelForCausalLM, {"model_type": "llama", "vocab_size": 50, **GROUPS})
    sites = find_attention(model)
    whole, single = torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0]), torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    assert cache_bytes(sites) == cache_bytes(sites, single) == 2 * cache_bytes(sites, whole) == 256


def test_models_that_do_not_generate_keep_nothing():
    assert cache_bytes_of(build("bert")) == 0


def test_costs_state_both():
    model = from_config(AutoModelForCausalLM, {"model_type": "llama", "vocab_size": 50, **GROUPS})
    cut = remove_heads_(copy.deepcopy(model), torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0]))
    cost = measure_cost(model, cut, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, batch_sizes=[])
    assert (cost.dense_cache, cost.pruned_cache) == (256, 128)
