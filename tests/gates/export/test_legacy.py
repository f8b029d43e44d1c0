import pytest
import torch
from safetensors.torch import load_file, save_file

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.legacy import load_legacy, mask_of_pruned_heads, parse_pruned_heads
from tests import version4
from tests.models import build as build_family
from tests.version4 import FAMILIES, HEADS, LAYERS, SOME, WHOLE_LAYER, Version4, edit_config


def outputs(model, family):
    with torch.no_grad():
        return model.eval()(**version4.inputs(family))[0]


@pytest.mark.parametrize(("removed", "old_names"), [(SOME, True), (WHOLE_LAYER, False)], ids=["some", "whole_layer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_loaded_model_computes_what_the_pruned_one_did(name, removed, old_names, tmp_path):
    expected = version4.write(tmp_path / "old", FAMILIES[name], removed, old_names=old_names)
    model, mask = load_legacy(tmp_path / "old")
    torch.testing.assert_close(outputs(model, FAMILIES[name]), expected)
    assert not hasattr(model.config, "pruned_heads")
    by_layer = {layer: part.tolist() for layer, part in enumerate(mask.split(HEADS))}
    assert by_layer == {layer: [float(head not in removed.get(layer, [])) for head in range(HEADS)] for layer in range(LAYERS)}


ALBERT = {
    "architectures": ["AlbertModel"], "model_type": "albert", **version4.BERT_SIZES, "embedding_size": 8,
    "num_hidden_layers": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "inner", "pruned_heads", "places"),
    [
        (1, 1, {"0": [1, 3]}, {(0, 0): [1, 3]}),  # four passes through one layer
        (1, 1, {"-1": [2]}, {(0, 0): [2]}),
        (2, 2, {"0": [1], "1": [3], "2": [0, 1]}, {(0, 0): [1], (0, 1): [3], (1, 0): [0, 1]}),
        (2, 2, {"-2": [0]}, {(1, 0): [0]}),
        (2, 2, {"-1": [0], "3": [2]}, {(0, 1): [0], (1, 1): [2]}),  # version 4 cut its quotient towards zero
    ],
)
def test_the_shared_layers_of_albert(groups, inner, pruned_heads, places, tmp_path):
    config = {**ALBERT, "num_hidden_groups": groups, "inner_group_num": inner}
    path = "encoder.albert_layer_groups.{}.albert_layers.{}.attention"
    family = Version4("AutoModel", config, path, ("query", "key", "value"), "dense")
    expected = version4.write(tmp_path / "old", family, places)
    edit_config(tmp_path / "old", pruned_heads=pruned_heads)
    model, mask = load_legacy(tmp_path / "old")
    torch.testing.assert_close(outputs(model, family), expected)
    kept = dict(zip([site.name for site in find_attention(model)], mask.split(HEADS), strict=True))
    assert {name: part.tolist() for name, part in kept.items()} == {
        path.format(*place): [float(head not in places.get(place, [])) for head in range(HEADS)]
        for place in [(group, layer) for group in range(groups) for layer in range(inner)]
    }


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "xlm", "albert"])
def test_version_4_counted_layers_from_the_end_too(name, tmp_path):
    expected = version4.write(tmp_path / "old", FAMILIES[name], SOME)
    edit_config(tmp_path / "old", pruned_heads={"0": [1, 2], "-1": [0]})
    model, mask = load_legacy(tmp_path / "old")
    torch.testing.assert_close(outputs(model, FAMILIES[name]), expected)
    assert mask.tolist() == [1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ["xlm-roberta", "camembert"])
def test_families_with_the_keys_of_roberta(name, tmp_path):
    stock = {"xlm-roberta": "XLMRobertaForSequenceClassification", "camembert": "CamembertForSequenceClassification"}
    expected = version4.write(tmp_path / "old", FAMILIES["roberta"], SOME)
    edit_config(tmp_path / "old", model_type=name, architectures=[stock[name]])
    model, _ = load_legacy(tmp_path / "old")
    assert type(model).__name__ == stock[name]
    torch.testing.assert_close(outputs(model, FAMILIES["roberta"]), expected)


def test_a_mask_leaves_cross_attention_alone():
    sites = find_attention(build_family("bart"))
    mask = mask_of_pruned_heads({1: frozenset({0, 3})}, sites)
    parts = dict(zip([site.label for site in sites], mask.split([site.heads for site in sites]), strict=True))
    assert {label for label, part in parts.items() if not part.all()} == {"encoder.1", "decoder.1"}
    assert parts["encoder.1"].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_pruned_heads_are_the_union_and_empty_layers_fall_out():
    found = parse_pruned_heads({"2": [3, 1, 1], "0": [], "02": [0], "-1": [2], "-3": []}, layers=3, heads=4)
    assert found == {2: frozenset({0, 1, 2, 3})}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"3": [0]}, "layer '3'"),
        ({"-4": [0]}, "layer '-4'"),
        ({"--1": [0]}, "layer '--1'"),
        ({"-1": [-1]}, "head -1"),
        ({"first": [0]}, "layer 'first'"),
        ({"9" * 5000: [0]}, "layers 0 to 2"),
        ({"0": [4]}, "head 4 of layer 0"),
        ({"0": [-1]}, "head -1"),
        ({"0": [True]}, "head True"),
        ({"0": ["1"]}, "head '1'"),
        ({"0": [1.5]}, "head 1.5"),
        ({"0": 1}, "a list of head numbers"),
        ({"0": "12"}, "a list of head numbers"),
        ([[0, 1]], "lists of head numbers by layer"),
    ],
)
def test_impossible_pruned_heads(value, said):
    with pytest.raises(GateError, match=r"pruned_heads in config\.json") as caught:
        parse_pruned_heads(value, layers=3, heads=4)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("claimed", [{0: [1]}, {0: [1, 2], 1: [0], 2: [0]}, {2: [0]}], ids=["fewer", "more", "dense"])
def test_weights_of_another_shape(name, claimed, tmp_path):
    version4.write(tmp_path / "old", FAMILIES[name], SOME)
    edit_config(tmp_path / "old", pruned_heads={str(layer): heads for layer, heads in claimed.items()})
    with pytest.raises(GateError, match=r"use the config\.json of these weights"):
        load_legacy(tmp_path / "old")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "t5"}, "'t5' cannot be converted; expected one of bert"),
        ({"model_type": None}, "None cannot be converted"),
        ({"model_type": ["bert"]}, r"\['bert'\] cannot be converted"),
        ({"architectures": ["BertForNothing"]}, "expected a list with one Transformers class"),
        ({"architectures": ["GPT2LMHeadModel"]}, "for 'bert'"),
        ({"architectures": ["BertConfig"]}, "expected a list with one Transformers class"),
        ({"architectures": None}, "None as architectures"),
        (
            {"architectures": ["BertForSequenceClassification"]},
            "missing .the first is 'bert.pooler.dense.bias'. and .* unexpected",
        ),
        ({"num_attention_heads": 0}, "0 heads for a width of 16"),
        ({"num_attention_heads": 3}, "3 heads for a width of 16"),
        ({"vocab_size": 51}, "do not load as BertForMaskedLM"),
        ({"hidden_size": "wide"}, "not a config of 'bert'"),
    ],
)
def test_configs_that_do_not_fit(change, said, tmp_path):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    edit_config(tmp_path / "old", **change)
    with pytest.raises(GateError, match=said):
        load_legacy(tmp_path / "old")


def test_remote_code_of_the_old_checkpoint_is_not_used(tmp_path):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    (tmp_path / "old" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    code = {"AutoConfig": "evil.Evil", "AutoModelForMaskedLM": "evil.Evil"}
    edit_config(tmp_path / "old", auto_map=code, _attn_implementation="someone/kernel")
    model, _ = load_legacy(tmp_path / "old")
    assert model.config._attn_implementation in ("eager", "sdpa")
    assert not hasattr(model.config, "auto_map")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("layer", "said"), [("9999999", "1 unexpected"), ("9" * 5000, "do not load as BertForMaskedLM")])
def test_a_key_of_an_absurd_layer(layer, said, tmp_path):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    weights = load_file(tmp_path / "old" / "model.safetensors")
    weights[f"bert.encoder.layer.{layer}.attention.self.query.bias"] = torch.ones(1)
    save_file(weights, tmp_path / "old" / "model.safetensors")
    with pytest.raises(GateError, match=said):
        load_legacy(tmp_path / "old")
