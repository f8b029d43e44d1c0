import itertools
import json

import pytest
import torch
import transformers

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import own_auto_class, save_pruned
from gates.export.stock import pad_heads
from gates.gating.latency import LatencyTable, SiteTimes
from gates.surgery.masks import load_mask
from tests.gates.chosen import chosen
from tests.models import masked
from tools.coverage import architectures as zoo

POSSIBLE = ("Llama", "Qwen3", "Mistral", "Gemma", "NomicBert", "GptOss", "T5", "ViT")


def make(name):
    architecture = zoo.BY_NAME[name]
    return architecture, zoo.build(architecture), zoo.inputs(architecture)


def mask_of(kept):
    """The mask of the heads that each layer of four keeps."""
    return torch.tensor([[float(head in own) for head in range(4)] for own in kept]).flatten()


def masked_output(model, mask, batch):
    return masked(model, mask, lambda: model(**batch)[0])


@pytest.mark.parametrize("name", chosen(POSSIBLE, fast=["Llama"], integration=["Gemma", "NomicBert", "T5", "ViT"]))
@pytest.mark.parametrize("keep", [[0, 1], [1, 3]], ids=["one group", "across groups"])
def test_equal_counts_become_a_stock_model(tmp_path, name, keep):
    architecture, model, batch = make(name)
    mask = mask_of([keep] * (architecture.heads // 4))
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
        ("Laguna", [[0, 1], [0, 2], [0, 2], [0, 2]], "one num_key_value_heads for all its layers, but this mask leaves 1"),
        ("Gemma4", [[0, 2], [0, 1, 2, 3], [0, 2], [0, 2]], "one num_attention_heads for all its layers"),
        ("Gemma4", [[0, 1], [0, 2], [0, 2], [0, 2]], "Layer type 'sliding_attention' is not homogeneous"),
    ],
)
def test_what_no_stock_class_can_hold_is_refused_with_the_reason(tmp_path, name, kept, reason):
    model, batch = (per_layer(name), None) if name in ("Laguna", "Gemma4") else make(name)[1:]
    with pytest.raises(GateError, match=reason) as caught:
        save_pruned(model, tmp_path / "out", mask_of(kept), form="stock", check_batch=batch, tokenizer=None)
    assert "use the form 'pruned'" in str(caught.value)  # what to use instead
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
    model, mask = per_layer(family), mask_of(kept)
    save_pruned(model, tmp_path / "out", mask, form="stock", tokenizer=None)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(loaded) is type(model)
    assert [(site.heads, site.kv_heads) for site in find_attention(loaded)] == left
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_attention_heads_per_layer" if family == "Laguna" else "per_layer_config"] == stated
    ids = torch.randint(3, 50, (2, 7))
    torch.testing.assert_close(loaded(ids)[0], masked_output(model, mask, {"input_ids": ids}), atol=5e-6, rtol=2e-5)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = masked(model, mask, lambda: model.generate(ids, **options))
    for cache in ("dynamic", "static"):
        assert torch.equal(loaded.generate(ids, cache_implementation=cache, **options), expected)


# Heads of zeros make a stock model of an uneven mask, which computes the same.


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "num_hidden_layers": 2, **more})).eval()


@pytest.mark.parametrize(
    ("name", "kept", "heads"),
    [
        ("Llama", [[3], [0, 1]], 2),
        ("Llama", [[], [2]], 1),
        ("Gemma3", [[1, 3], [2, 3]], 4),
        ("Qwen3", [[0], [1, 3]], 2),
        ("NomicBert", [[0, 1, 3], [2]], 3),
        ("ViT", [[], [1, 2]], 2),
    ],
)
def test_an_uneven_mask_becomes_a_stock_model_with_the_same_outputs(tmp_path, name, kept, heads):
    (_, model, batch), mask = make(name), mask_of(kept)
    save_pruned(model, tmp_path / "out", mask, form="stock", pad_heads=True, check_batch=batch, tokenizer=None)
    loaded = type(model).from_pretrained(tmp_path / "out").eval()
    assert type(loaded) is type(model)
    assert not (tmp_path / "out" / "modeling_pruned.py").exists()
    assert {site.heads for site in find_attention(loaded)} == {heads}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch)[0], masked(model, mask, lambda: model(**batch)[0]), atol=5e-6, rtol=2e-5)
    assert torch.equal(load_mask(tmp_path / "out" / "mask.json", find_attention(model)), mask)  # of the heads that count
    card, added = (tmp_path / "out" / "README.md").read_text(), 2 * heads - int(mask.sum())
    assert f"- Padded: {added} heads of zeros (`--pad_heads`) make all layers" in card


def test_a_mask_that_is_even_is_not_padded(tmp_path):
    mask = torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 0])
    save_pruned(llama(), tmp_path / "out", mask, form="stock", pad_heads=True, tokenizer=None)
    assert "- Padded: by no head" in (tmp_path / "out" / "README.md").read_text()


def test_gate_values_are_folded_into_the_heads_that_count(tmp_path):
    model, mask, values = llama(), torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0]), torch.rand(8)
    batch = {"input_ids": torch.randint(3, 50, (2, 6))}
    expected = masked(model, mask * values, lambda: model(**batch)[0])
    save_pruned(model, tmp_path / "out", mask, values=values, form="stock", pad_heads=True, tokenizer=None)
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(**batch)[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_padding_is_minimal_and_keeps_every_head_that_counts():
    """Against all masks with whole groups: none with fewer heads is equal in both layers and has the heads that count."""
    model = llama()
    generator = torch.Generator().manual_seed(0)
    options = {
        (groups, size): [
            torch.tensor([[1.0 if group in chosen and head in own[chosen.index(group)] else 0.0 for head in range(2)]
                          for group in range(2)]).flatten()
            for chosen in itertools.combinations(range(2), groups)
            for own in itertools.product(itertools.combinations(range(2), size), repeat=groups)
        ]
        for groups in (1, 2) for size in (1, 2)
    }  # fmt: skip
    for _ in range(20):
        mask = (torch.rand(8, generator=generator) < 0.4).float()
        padded = pad_heads(model, mask)
        assert bool((padded >= mask).all())
        fits = [
            groups * size
            for (groups, size), masks in options.items()
            if all(any(bool((one >= part).all()) for one in masks) for part in mask.split(4))
        ]
        assert padded.sum() == 2 * min(fits)


def test_numbers_that_the_config_does_not_take_are_passed_over():
    """LlamaConfig wants the hidden size to be a multiple of the heads: 3 of 4 heads are padded to 4."""
    model = llama(num_key_value_heads=4)
    assert pad_heads(model, torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0])).tolist() == [1.0] * 8


def test_the_fastest_number_of_heads_is_that_of_the_table():
    """Two heads are needed; three are measured faster, and four are as fast within the noise."""
    model, mask = zoo.build(zoo.BY_NAME["NomicBert"]), torch.tensor([1.0, 0, 0, 0, 1, 0, 1, 0])
    smooth = [0.0, 1.0, 3.0, 3.0, 3.0]

    def padded(measured):
        table = LatencyTable(1.0, [SiteTimes(f"encoder.{layer}", smooth, measured) for layer in range(2)])
        return pad_heads(model, mask, table).view(2, 4).sum(1).tolist()

    assert pad_heads(model, mask).view(2, 4).sum(1).tolist() == padded(None) == padded(smooth) == [2, 2]
    assert padded([0.0, 1.0, 4.0, 2.0, 1.99]) == [3, 3]
    with pytest.raises(GateError, match="measure one of this model"):
        pad_heads(model, mask, LatencyTable(1.0, [SiteTimes("encoder.0", smooth)]))


@pytest.mark.parametrize("name", ["Bert", "Bart", "GPT2"])
def test_a_class_that_derives_the_size_of_a_head_is_refused(tmp_path, name):
    architecture = zoo.BY_NAME[name]
    mask = torch.ones(architecture.heads)
    mask.view(-1, 4)[:, 0] = 0.0
    mask[1] = 0.0
    for kept in (mask, mask.view(-1, 4).roll(1, 0).flatten()):
        with pytest.raises(GateError, match=r"hidden size|must be divisible") as caught:
            save_pruned(zoo.build(architecture), tmp_path / "out", kept, form="stock", pad_heads=True, tokenizer=None)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
