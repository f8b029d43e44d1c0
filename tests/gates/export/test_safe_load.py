import copy
import json
import os
import pickle
import zipfile
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.safe_load import CHECKSUM_FILE, check_pruned_config, read_weights, verify_checksums, write_checksums
from gates.surgery.remove import remove_heads_
from tests.models import FAMILIES, build, random_mask

WEIGHTS = {"first.weight": torch.arange(6.0).reshape(2, 3), "second.bias": torch.tensor([1.5, -2.0]), "none": torch.zeros(0, 4)}


class Hostile:
    """Creates a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def same(found, expected=WEIGHTS):
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def described(weights):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}


def refused(call, *arguments, **more):
    with pytest.raises(GateError) as caught:
        call(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Reading


def test_safetensors_and_pickles_hold_the_same(tmp_path):
    for name in ("safe", "pickle", "both"):
        (tmp_path / name).mkdir()
    save_file(WEIGHTS, tmp_path / "safe" / "model.safetensors")
    torch.save(WEIGHTS, tmp_path / "pickle" / "pytorch_model.bin")
    assert same(read_weights(tmp_path / "safe"))
    assert same(read_weights(tmp_path / "safe" / "model.safetensors"))
    assert same(read_weights(tmp_path / "pickle", allow_pickle=True))

    save_file(WEIGHTS, tmp_path / "both" / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "both" / "pytorch_model.bin")
    assert same(read_weights(tmp_path / "both"))
    assert same(read_weights(tmp_path / "both", allow_pickle=True))


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "epoch.ckpt"])
def test_training_checkpoints_keep_their_weights_one_level_down(name, tmp_path):
    torch.save({"epoch": 3, "state_dict": WEIGHTS}, tmp_path / name)
    assert same(read_weights(tmp_path, allow_pickle=True))
    assert "allow_pickle" in refused(read_weights, tmp_path)


@pytest.mark.parametrize("pickled", [False, True])
def test_shards(pickled, tmp_path):
    ending, index = ("bin", "pytorch_model.bin") if pickled else ("safetensors", "model.safetensors")
    places = {}
    for number, key in enumerate(WEIGHTS):
        places[key] = f"part-{number}.{ending}"
        (torch.save if pickled else save_file)({key: WEIGHTS[key]}, tmp_path / places[key])
    (tmp_path / f"{index}.index.json").write_text(json.dumps({"weight_map": places}))
    assert same(read_weights(tmp_path, allow_pickle=pickled))
    if pickled:
        assert "allow_pickle" in refused(read_weights, tmp_path)

    wrong = {**places, "absent": places["none"]}
    (tmp_path / f"{index}.index.json").write_text(json.dumps({"weight_map": wrong}))
    assert "its shards lack it" in refused(read_weights, tmp_path, allow_pickle=True)
    (tmp_path / places["none"]).unlink()
    assert f"the shard {places['none']!r}" in refused(read_weights, tmp_path, allow_pickle=True)


@pytest.mark.parametrize("place", ["../outside.safetensors", "{root}/outside.safetensors", ""])
def test_an_index_does_not_lead_out_of_its_directory(place, tmp_path):
    (tmp_path / "model").mkdir()
    save_file(WEIGHTS, tmp_path / "outside.safetensors")
    places = dict.fromkeys(WEIGHTS, place.format(root=tmp_path))
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "expected the name of a file in its directory" in refused(read_weights, tmp_path / "model")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', "{" * 10_000, "[" * 100_000])
def test_a_damaged_index(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refused(read_weights, tmp_path)


def test_no_weights_or_too_many(tmp_path):
    assert "has no weights" in refused(read_weights, tmp_path)
    assert "does not exist" in refused(read_weights, tmp_path / "absent")
    for name in ("a.safetensors", "b.safetensors"):
        save_file(WEIGHTS, tmp_path / name)
    assert "a.safetensors, b.safetensors" in refused(read_weights, tmp_path)
    (tmp_path / "b.safetensors").unlink()
    assert same(read_weights(tmp_path))
    (tmp_path / "notes.txt").write_text("")
    assert "is not a weights file" in refused(read_weights, tmp_path / "notes.txt")


# Pickles


def hostile_pickle(kind, path, marker):
    content = {"weight": torch.ones(2), "payload": Hostile(marker)}
    if kind == "torch":
        torch.save(content, path)
    elif kind == "old torch":
        torch.save(content, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("kind", ["torch", "old torch", "plain"])
def test_a_hostile_pickle_is_not_executed(kind, tmp_path):
    path, marker = tmp_path / "pytorch_model.bin", tmp_path / "executed"
    hostile_pickle(kind, path, marker)
    assert "is a pickle, which can run code" in refused(read_weights, tmp_path)
    assert "a pickle of more than tensors" in refused(read_weights, tmp_path, allow_pickle=True)
    assert not marker.exists()

    if kind == "plain":  # the trap works: an ordinary unpickler falls into it
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert marker.exists()


def test_a_pickle_under_a_safe_name_is_not_executed(tmp_path):
    hostile_pickle("torch", tmp_path / "model.safetensors", tmp_path / "executed")
    assert "not a safetensors file" in refused(read_weights, tmp_path, allow_pickle=True)
    assert not (tmp_path / "executed").exists()


def test_damaged_pickles(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHTS, path)
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert "pytorch_model.bin" in refused(read_weights, tmp_path, allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nothing", "")
    assert "pytorch_model.bin" in refused(read_weights, tmp_path, allow_pickle=True)


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 1}, {3: torch.ones(1)}, "text", None, {"state_dict": {"a": None}}])
def test_a_pickle_without_a_state_dict(content, tmp_path):
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert "expected tensors by name" in refused(read_weights, tmp_path, allow_pickle=True)


# Damage


def test_safetensors_cut_anywhere_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "truncated, damaged or not a safetensors file" in refused(read_weights, tmp_path)


def test_no_flipped_bit_of_a_header_changes_a_tensor_unnoticed(tmp_path):
    """It is refused, or a tensor has another name or (an empty one) another shape, which the model does not load."""
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    outcomes = {"refused": 0, "described otherwise": 0}
    for position in range(header):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[position] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = read_weights(tmp_path)
            except GateError:
                outcomes["refused"] += 1
            else:
                assert described(found) != described(WEIGHTS)
                outcomes["described otherwise"] += 1
    assert all(outcomes.values())
    assert sum(outcomes.values()) == 8 * header


def test_checksums_notice_every_flipped_bit(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(WEIGHTS, path)
    write_checksums(tmp_path)
    verify_checksums(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        assert "model.safetensors" in refused(verify_checksums, tmp_path)
    assert not same(load_file(path))  # safetensors itself sees nothing wrong
    path.write_bytes(whole)
    verify_checksums(tmp_path)


# Checksums


@pytest.fixture
def export(tmp_path):
    (tmp_path / "onnx").mkdir()
    for name in ("config.json", "model.safetensors", "mask.json", "README.md", "onnx/model.onnx", ".gitattributes"):
        (tmp_path / name).write_text(f"content of {name}")
    write_checksums(tmp_path)
    return tmp_path


def test_checksums_list_every_file_but_the_card_and_hidden_ones(export):
    listed = json.loads((export / CHECKSUM_FILE).read_text())["sha256"]
    assert set(listed) == {"config.json", "model.safetensors", "mask.json", "onnx/model.onnx"}
    # printf 'content of config.json' | sha256sum
    assert listed["config.json"] == "5c5e4e34186b39aefbb453c12d4e90f311ccefaca102765d6019d1d20421ff54"
    before = (export / CHECKSUM_FILE).read_bytes()
    write_checksums(export)
    assert (export / CHECKSUM_FILE).read_bytes() == before


def test_a_card_may_be_edited_files_added_and_the_list_removed(export):
    (export / "README.md").write_text("better")
    (export / "notes.txt").write_text("mine")
    verify_checksums(export)
    (export / CHECKSUM_FILE).unlink()
    (export / "config.json").write_text("something else")
    verify_checksums(export)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "onnx/model.onnx"])
def test_a_file_that_changed_or_is_gone_is_named(name, export):
    (export / name).write_text("something else")
    assert name in refused(verify_checksums, export)
    (export / name).unlink()
    assert repr(name) in refused(verify_checksums, export)
    assert "missing" in refused(verify_checksums, export)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": 1}', '{"sha256": {"config.json": 5}}', "\udcff"])
def test_a_damaged_list_of_checksums(content, export):
    (export / CHECKSUM_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert CHECKSUM_FILE in refused(verify_checksums, export)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "onnx/../../secret", ""])
def test_a_list_of_checksums_does_not_lead_out_of_its_directory(name, export):
    (export / CHECKSUM_FILE).write_text(json.dumps({"sha256": {name: "0" * 64}}))
    assert "expected the name of a file in its directory" in refused(verify_checksums, export)


# Configs


def config(**changes):
    shape = {
        "heads": 2,
        "kv_heads": 1,
        "projections": {"q_proj": [16, 8], "o_proj": [8, 16]},
        "attributes": {"num_heads": 2, "inner.scaling": 0.5, "is_causal": True, "window": None},
    }
    values = {"num_attention_heads": 4, "pruned_attention": {"layers.0.self_attn": shape | changes}}
    return SimpleNamespace(**values, to_dict=lambda: values)


def test_good_configs_pass():
    check_pruned_config(config())
    check_pruned_config(config(heads=0, kv_heads=0))
    check_pruned_config(
        config(parameters={"sinks": [2]}, headless={"core": "", "kind": "cross"}, later={"x": ["a.b", 3, None]})
    )
    check_pruned_config(SimpleNamespace())
    check_pruned_config(SimpleNamespace(pruned_attention={}, to_dict=dict))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_surgery_writes_passes(name):
    model = remove_heads_(build(name), random_mask(name))
    assert model.config.pruned_attention
    check_pruned_config(model.config)
    check_pruned_config(type(model.config).from_dict(json.loads(model.config.to_json_string())))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": -1}, "-1"),
        ({"heads": 2.0}, "heads in pruned_attention of 'layers.0.self_attn' in config.json is 2.0"),
        ({"heads": True}, "is True; expected a whole number from 0 to 4"),
        ({"kv_heads": None}, "is None; expected a whole number"),
        ({"heads": 3, "kv_heads": 2}, "is 2; expected a divisor of the 3 heads"),
        ({"heads": 2, "kv_heads": 0}, "is 0; expected a divisor of the 2 heads"),
        ({"heads": 5, "kv_heads": 5}, "is 5; expected a whole number from 0 to 4"),
        ({"projections": []}, "projections in pruned_attention"),
        ({"projections": {"q_proj": [16]}}, "[16]"),
        ({"projections": {"q_proj": [16, 8, 1]}}, "[features in, features out]"),
        ({"projections": {"q_proj": [16, "8"]}}, "[features in, features out]"),
        ({"projections": {"q_proj": [16, -8]}}, "-8"),
        ({"projections": {"q proj": [16, 8]}}, "'q proj'"),
        ({"projections": {"q_proj..x": [16, 8]}}, "'q_proj..x'"),
        ({"attributes": {"__class__": 1}}, "'__class__'"),
        ({"attributes": {"config._attn_implementation": 1}}, "'config._attn_implementation'"),
        ({"attributes": {"_private": 1}}, "'_private'"),
        ({"attributes": {"num_heads; import os": 1}}, "'num_heads; import os'"),
        ({"attributes": {"num_heads\n": 1}}, "num_heads"),
        ({"attributes": {"num_heads": "eager"}}, "'eager'"),
        ({"attributes": {"num_heads": [1]}}, "[1]"),
        ({"attributes": {"scaling": float("nan")}}, "nan"),
        ({"attributes": {"num_heads": 10**12}}, "1000000000000"),
        ({"attributes": {"": 1}}, "''"),
        ({"config": {"num_attention_heads": "two"}}, "'two'"),
        ({"modules": {"norms": 3}}, "is 3; expected at most one each of 2 heads"),
        ({"later": {"path": "../../x"}}, "'../../x'"),
        ({"later": [[{"x": "__import__"}]]}, "'__import__'"),
        ({"later": object()}, "object"),
    ],
)
def test_impossible_configs(changes, said):
    message = refused(check_pruned_config, config(**changes))
    assert "pruned_attention" in message
    assert said in message


@pytest.mark.parametrize("name", ["", "layers..0", "layers.0.__class__", "a b", "a/b", "ä", "a\n", 3])
def test_impossible_module_names(name):
    values = config()
    values.pruned_attention[name] = values.pruned_attention.pop("layers.0.self_attn")
    assert "pruned_attention" in refused(check_pruned_config, values)


@pytest.mark.parametrize("value", [[], "layers", 3, {"layers": None}, {"layers": [2, 1]}])
def test_configs_of_another_structure(value):
    assert "pruned_attention" in refused(check_pruned_config, SimpleNamespace(pruned_attention=value, to_dict=dict))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_attention_kernels_from_elsewhere(key):
    values = {"hidden_size": 16, "num_attention_heads": 4, key: "someone/kernel"}
    assert "someone/kernel" in refused(check_pruned_config, transformers.BertConfig.from_dict(values))
    check_pruned_config(transformers.BertConfig.from_dict(values | {key: "sdpa"}))
    nested = transformers.CLIPConfig.from_dict({key: {"text_config": "someone/kernel"}})
    assert "someone/kernel" in refused(check_pruned_config, nested)


def test_head_counts_of_every_part_of_a_config_are_known():
    model = build("bart")
    heads = {site.heads for site in find_attention(model)}
    assert heads == {4}
    remove_heads_(model, random_mask("bart"))
    wrong = copy.deepcopy(model.config)
    next(iter(wrong.pruned_attention.values())).update(heads=8, kv_heads=8)
    assert "from 0 to 4" in refused(check_pruned_config, wrong)
    wrong.encoder_attention_heads = 8
    check_pruned_config(wrong)
