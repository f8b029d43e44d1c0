import json

import pytest
import torch
import transformers

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import own_auto_class, save_pruned
from tests.gates.chosen import chosen
from tests.models import masked
from tools.coverage import architectures as zoo

POSSIBLE = ("Llama", "Qwen3", "Mistral", "Gemma", "NomicBert", "GptOss", "T5", "ViT")


def make(name):
    architecture = zoo.BY_NAME[name]
    return architecture, zoo.build(architecture), zoo.inputs(architecture)


def same_heads_everywhere(architecture, keep):
    layer = torch.zeros(4)
    layer[keep] = 1.0
    return layer.repeat(architecture.heads // 4)


def masked_output(model, mask, batch):
    return masked(model, mask, lambda: model(**batch)[0])


@pytest.mark.parametrize("name", chosen(POSSIBLE, fast=["Llama"], integration=["Gemma", "NomicBert", "T5", "ViT"]))
@pytest.mark.parametrize("keep", [[0, 1], [1, 3]], ids=["one group", "across groups"])
def test_equal_counts_become_a_stock_model(tmp_path, name, keep):
    architecture, model, batch = make(name)
    mask = same_heads_everywhere(architecture, keep)
    expected = masked_output(model, mask, batch)
    save_pruned(model, tmp_path / "out", mask, form="stock", check_batch=batch, tokenizer=None)
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        "README.md", "checksums.json", "config.json", "generation_config.json", "mask.json", "model.safetensors",
    }  # fmt: skip
    loaded = getattr(transformers, own_auto_class(model)).from_pretrained(tmp_path / "out").eval()
    assert type(loaded) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0], expected, atol=5e-6, rtol=2e-5)
    assert {(site.heads, site.head_dim) for site in find_attention(loaded)} == {(2, 8)}
    assert loaded.config.num_attention_heads == 2
    if architecture.kv_heads == 2:
        assert loaded.config.num_key_value_heads == (1 if keep == [0, 1] else 2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"auto_map", "pruned_attention"} & config.keys()


@pytest.mark.parametrize(
    ("name", "kept", "reason"),
    [
        ("Llama", [[0, 1], [0, 1, 2, 3]], "2 in decoder.0 and 4 in decoder.1"),
        ("Llama", [[0], []], "none in decoder.1"),
        ("Llama", [[0, 1, 2], [0, 1, 3]], "not a multiple"),  # LlamaConfig wants the hidden size to be one
        ("Bert", [[0, 1], [0, 1]], "size of a head from the hidden size, so it has no stock form with fewer heads"),
        ("GPT2", [[0, 1, 2], []], "derives the size of a head from the hidden size"),
        ("Bart", [[0, 1]] * 6, "hidden size"),
        ("T5", [[0, 1], [2, 3]] * 3, "relative_attention_bias"),  # layers of a stack share one table
    ],
    ids=["counts differ", "no head", "config refuses", "Bert", "GPT2 and no head", "Bart", "T5"],
)
def test_what_no_stock_class_can_hold_is_refused_with_the_reason(tmp_path, name, kept, reason):
    _, model, batch = make(name)
    mask = torch.zeros(len(kept), 4)
    for row, heads in zip(mask, kept, strict=True):
        row[heads] = 1.0
    with pytest.raises(GateError, match=reason) as caught:
        save_pruned(model, tmp_path / "out", mask.flatten(), form="stock", check_batch=batch, tokenizer=None)
    assert "remote code" in str(caught.value)  # what to use instead
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


TINY = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 40, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 50}
LAGUNA = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def per_layer(family):
    """A tiny model of a family that reads numbers of heads or of key/value heads by layer."""
    torch.manual_seed(0)
    if family == "Laguna":
        return transformers.LagunaForCausalLM(transformers.LagunaConfig(**TINY, **LAGUNA)).eval()
    types = ["sliding_attention"] * 3 + ["full_attention"]
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**TINY, **GEMMA4, layer_types=types)).eval()


@pytest.mark.parametrize(
    ("family", "kept", "left", "stated"),
    [
        ("Laguna", [[1, 3], [0, 2], [0, 1, 2, 3], [0, 2]], [(2, 2), (2, 2), (4, 2), (2, 2)], [2, 2, 4, 2]),
        (
            "Gemma4",
            [[2, 3], [0, 1], [2, 3], [1, 2]],
            [(2, 1), (2, 1), (2, 1), (2, 2)],
            {**{str(layer): {"num_key_value_heads": 1} for layer in range(3)}, "3": {"head_dim": 16}},
        ),
    ],
)
def test_what_a_family_reads_by_layer_may_differ_by_layer(tmp_path, family, kept, left, stated):
    model, mask = per_layer(family), torch.zeros(4, 4)
    for row, heads in zip(mask, kept, strict=True):
        row[heads] = 1.0
    save_pruned(model, tmp_path / "out", mask.flatten(), form="stock", tokenizer=None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(loaded) is type(model)
    assert [(site.heads, site.kv_heads) for site in find_attention(loaded)] == left
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_attention_heads_per_layer" if family == "Laguna" else "per_layer_config"] == stated
    ids = torch.randint(3, 50, (2, 7))
    torch.testing.assert_close(loaded(ids)[0], masked_output(model, mask.flatten(), {"input_ids": ids}), atol=5e-6, rtol=2e-5)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = masked(model, mask.flatten(), lambda: model.generate(ids, **options))
    for cache in ("dynamic", "static"):
        assert torch.equal(loaded.generate(ids, cache_implementation=cache, **options), expected)


@pytest.mark.parametrize(
    ("family", "kept", "reason"),
    [
        ("Laguna", [[0, 1], [0, 2], [0, 2], [0, 2]], "one num_key_value_heads for all its layers, but this mask leaves 1"),
        ("Gemma4", [[0, 2], [0, 1, 2, 3], [0, 2], [0, 2]], "one num_attention_heads for all its layers"),
        ("Gemma4", [[0, 1], [0, 2], [0, 2], [0, 2]], "Layer type 'sliding_attention' is not homogeneous"),
    ],
)
def test_what_a_family_does_not_read_by_layer_is_refused(tmp_path, family, kept, reason):
    mask = torch.zeros(4, 4)
    for row, heads in zip(mask, kept, strict=True):
        row[heads] = 1.0
    with pytest.raises(GateError, match=reason) as caught:
        save_pruned(per_layer(family), tmp_path / "out", mask.flatten(), form="stock", tokenizer=None)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
