"""Bytes of the key/value cache per token, against the caches that models make."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from gates.attention.inputs import example_inputs
from gates.attention.sites import find_attention
from gates.export.cost import cache_bytes, cache_bytes_of, generates, measure_cost
from gates.surgery.remove import remove_heads_, why_not_removable
from tests.gates.chosen import architectures, chosen
from tools.coverage import architectures as zoo
from tools.coverage.tiny import tiny_models
from training.tasks import from_config

GROUPS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
}  # fmt: skip


def llama():
    return from_config(AutoModelForCausalLM, {"model_type": "llama", "vocab_size": 50, **GROUPS}).eval()


def stored(model, batch):
    """Bytes of keys and values that a model's own cache holds for each token of one text, by layers with windows too."""
    if "decoder_input_ids" in batch:
        prompt = {name: tensor for name, tensor in batch.items() if name != "decoder_input_ids"}
        found = model.generate(**prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    else:
        with torch.no_grad():
            found = model(**batch, use_cache=True)
    cache = found.get("past_key_values")
    cache = getattr(cache, "self_attention_cache", cache)
    layers = [] if cache is None else [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return sum(part.nbytes // part.shape[2] for layer in layers for part in (layer.keys, layer.values))


def masks(sites):
    """Half of every site's heads, and other numbers at every site, with groups that keep different numbers of queries."""
    yield torch.cat([(torch.arange(site.heads) >= site.heads // 2).float() for site in sites])
    yield torch.cat([(torch.arange(site.heads) <= (index + 1) % site.heads).float() for index, site in enumerate(sites)])


def check(model, batch):
    sites = find_attention(model)
    assert cache_bytes_of(model) == stored(model, batch)
    if why_not_removable(sites):
        return
    for mask in masks(sites):
        cut = remove_heads_(copy.deepcopy(model), mask)
        assert cache_bytes_of(model, mask) == cache_bytes_of(cut) == stored(cut, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_the_cache_holds_of_a_token(dtype):
    check(llama().to(dtype), {"input_ids": torch.arange(8)[None] + 1})


CHOSEN = ("Falcon (new decoder)", "Olmo2", "DeepseekV3", "GptOss", "Bart", "T5")
DECODERS = architectures(("GPT2",), CHOSEN, only=lambda row: row.generates and row.input != "audio-to-text")


@pytest.mark.parametrize("name", DECODERS)
def test_it_is_that_of_every_decoder_in_the_coverage_table(name):
    """Norms over all heads (OLMo 2), one latent for all heads (DeepSeek), keys repeated for every query (Falcon), windows."""
    architecture = zoo.BY_NAME[name]
    check(zoo.build(architecture), zoo.inputs(architecture, batch=1, padding=False))


TYPES = (
    *("olmo3", "flex_olmo", "olmoe", "minimax_m2"),  # norms over all heads
    *("minimax", "kimi_linear", "glm5_next", "qwen3_next"),  # attention as a recurrence
    *("minicpm3", "deepseek_v2", "youtu", "mistral_large4", "glm_moe_dsa"),  # latents
    "openai-gpt",  # no cache
    "gemma3n_text",  # keys of other layers
    "mimo_v2_flash",  # keys wider than values
)


@pytest.mark.parametrize(
    "name", chosen(TYPES, fast=["openai-gpt"], integration=["olmo3", "minimax", "deepseek_v2", "gemma3n_text", "mimo_v2_flash"])
)
def test_it_is_that_of_types_with_caches_of_their_own(name):
    model = next(model for model in tiny_models(name) if generates(model))
    check(model, example_inputs(model, batch=1, length=8))


def test_whole_groups_shrink_it_and_single_heads_of_groups_do_not():
    """The reason for gates on groups."""
    sites = find_attention(llama())
    whole, single = torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0]), torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    assert cache_bytes(sites) == cache_bytes(sites, single) == 2 * cache_bytes(sites, whole) == 256


def test_costs_state_both():
    model = llama()
    cut = remove_heads_(copy.deepcopy(model), torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0]))
    cost = measure_cost(model, cut, {"input_ids": torch.ones(1, 4, dtype=torch.long)}, batch_sizes=[])
    assert (cost.dense_cache, cost.pruned_cache) == (256, 128)
