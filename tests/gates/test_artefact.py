import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from gates import artefact
from gates.artefact import GateConfig
from gates.errors import GateError
from gates.model import GatedModel, get_gated_model
from tests.models import build, inputs, logits

FILES = {"gate_config.json", "gates.safetensors", "README.md"}


def trained(name="bert", **config):
    """A gated model whose gates are all different."""
    gated = get_gated_model(build(name), GateConfig(**config))
    with torch.no_grad():
        gated.gates.log_alpha.copy_(torch.linspace(-3, 3, gated.gates.size))
    return gated


def is_untouched(model):
    return not any(module._forward_pre_hooks for module in model.modules())


# -- configuration -----------------------------------------------------------------------------------------------


def test_a_configuration_survives_json(tmp_path):
    config = GateConfig(
        unit="group", temperature=0.66, stretch_low=-0.5, stretch_high=1.5, initial_log_alpha=-1.0,
        straight_through=True, draw_per="batch", base_model="someone/model", budget={"encoder": 3},
    )  # fmt: skip
    config.to_json_file(tmp_path / "config.json")
    assert GateConfig.from_json_file(tmp_path / "config.json") == config
    (tmp_path / "config.json").write_text("{}")
    assert GateConfig.from_json_file(tmp_path / "config.json") == GateConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unit": "layer"}, "unit is 'layer'; expected 'head' or 'group'"),
        ({"unit": ["head"]}, "expected 'head' or 'group'"),
        ({"temperature": "warm"}, "temperature is 'warm'; expected a number such as 0.33"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": 0}, "temperature is 0"),
        ({"initial_log_alpha": float("nan")}, "initial_log_alpha is nan"),
        ({"straight_through": 1}, "straight_through is 1; expected a value such as False"),
        ({"draw_per": "token"}, "draw_per is 'token'; expected 'batch' or 'example'"),
        ({"stretch_low": 0.1}, "must contain"),
        ({"base_model": None}, "base_model is None"),
        ({"temprature": 0.3}, "unknown field 'temprature'"),
        ({"family": "soft"}, "family is 'soft'; expected 'hard-concrete' or"),
        ({"budget": "3"}, "budget is '3'; expected a number"),
    ],
)
def test_fields_that_are_unknown_or_ill_typed_are_refused(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(GateError) as error:
        GateConfig.from_json_file(tmp_path / "config.json")
    assert message in str(error.value)
    assert "config.json" in str(error.value)


# -- saving and loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("bert", {"temperature": 0.5}),
        ("llama", {"unit": "group"}),
        ("marian", {}),
        ("bert", {"family": "clamped-linear"}),
        ("bert", {"family": "straight-through-top-k", "budget": 3}),
        ("bert", {"family": "relaxed-top-k", "budget": 0.5}),
    ],
)
def test_gates_survive_a_round_trip(tmp_path, name, config):
    gated = trained(name, **config)
    gated.save_pretrained(tmp_path / "gates")
    assert {path.name for path in (tmp_path / "gates").iterdir()} == FILES
    assert sum(path.stat().st_size for path in (tmp_path / "gates").iterdir()) < 8192
    again = GatedModel.from_pretrained(build(name), tmp_path / "gates")
    assert torch.equal(again.gates.log_alpha, gated.gates.log_alpha)
    assert again.gate_config == gated.gate_config
    assert torch.equal(again.gates.values(), gated.gates.values())
    assert torch.equal(logits(again.eval(), inputs(name)), logits(gated.eval(), inputs(name)))


def test_saving_again_replaces_all_but_a_readme_of_ones_own(tmp_path):
    gated = trained()
    gated.save_pretrained(tmp_path)
    first = (tmp_path / "README.md").read_text()
    gated.set_mask_(torch.zeros(8)).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() != first
    (tmp_path / "README.md").write_text("my own words")
    trained().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own words"
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert GatedModel.from_pretrained(build("bert"), tmp_path).gates.mode == "stochastic"


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    trained().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(artefact, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        trained(temperature=0.5).save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(GateError, match="is a file"):
        trained().save_pretrained(tmp_path / "README.md")


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["gates.safetensors", "gate_config.json"])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path, file):
    trained().save_pretrained(tmp_path)
    content = (tmp_path / file).read_bytes()
    gated = get_gated_model(build("bert"))
    before = gated.gates.log_alpha.detach().clone()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << (position % 8)
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(GateError):
            gated.load_gates_(tmp_path)
    assert torch.equal(gated.gates.log_alpha, before)
    (tmp_path / file).write_bytes(content)
    assert not torch.equal(gated.load_gates_(tmp_path).gates.log_alpha, before)


@pytest.mark.parametrize("file", ["gates.safetensors", "gate_config.json"])
def test_truncated_and_missing_files_are_refused(tmp_path, file):
    trained().save_pretrained(tmp_path)
    content = (tmp_path / file).read_bytes()
    model = build("bert")
    for length in (0, 7, 8, len(content) // 2, len(content) - 3):
        (tmp_path / file).write_bytes(content[:length])
        with pytest.raises(GateError, match=file.replace(".", r"\.")):
            GatedModel.from_pretrained(model, tmp_path)
        assert is_untouched(model)
    (tmp_path / file).unlink()
    with pytest.raises(GateError, match="cannot read"):
        GatedModel.from_pretrained(model, tmp_path)
    assert is_untouched(model)


def test_a_pickle_is_never_read(tmp_path):
    trained().save_pretrained(tmp_path)
    (tmp_path / "gates.safetensors").unlink()
    torch.save({"log_alpha": torch.zeros(8), "mask": torch.ones(8)}, tmp_path / "gates.bin")
    shutil.copy(tmp_path / "gates.bin", tmp_path / "gates.pt")
    with pytest.raises(GateError, match="cannot read"):
        GatedModel.from_pretrained(build("bert"), tmp_path)
    shutil.copy(tmp_path / "gates.bin", tmp_path / "gates.safetensors")
    with pytest.raises(GateError, match="no safetensors file"):
        GatedModel.from_pretrained(build("bert"), tmp_path)


def test_tensors_that_are_no_gates_are_refused(tmp_path):
    trained().save_pretrained(tmp_path)
    path = tmp_path / "gates.safetensors"
    tensors = load_file(path)
    sites = '[["a", 8]]'
    for wrong, names in (
        ({"log_alpha": tensors["log_alpha"]}, sites),
        (tensors | {"more": torch.ones(8)}, sites),
        (tensors | {"log_alpha": torch.ones(8, dtype=torch.bfloat16)}, sites),
        (tensors | {"log_alpha": torch.tensor(1.0)}, sites),
        *((tensors, names) for names in ("[1]", "[" * 100_000, "{}")),
    ):
        save_file(wrong, path, metadata={"mode": "stochastic", "sites": names, "checksum": ""})
        with pytest.raises(GateError, match="holds no gates"):
            GatedModel.from_pretrained(build("bert"), tmp_path)


def test_gates_of_another_model_are_refused(tmp_path):
    trained("bert").save_pretrained(tmp_path)
    for other in ("roberta", "marian"):
        model = build(other)
        with pytest.raises(GateError, match=r"2 sites with 8 gates .*use the model they were trained with"):
            GatedModel.from_pretrained(model, tmp_path)
        assert is_untouched(model)


def test_gates_of_other_settings_are_refused(tmp_path):
    trained().save_pretrained(tmp_path)
    with pytest.raises(GateError, match=r"temperature 0\.33, but these have 0\.5"):
        trained(temperature=0.5).load_gates_(tmp_path)
    with pytest.raises(GateError, match="were trained with family"):
        trained(family="clamped-linear").load_gates_(tmp_path)


# -- the hub -----------------------------------------------------------------------------------------------------


def test_push_to_hub_uploads_the_artefact(monkeypatch):
    calls = []

    class Api:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, repo_id, *, private, exist_ok):
            calls.append(("create", repo_id, private, exist_ok))

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            gated = GatedModel.from_pretrained(build("bert"), folder_path)
            calls.append(("upload", repo_id, commit_message, gated.mask().tolist()))
            return SimpleNamespace(oid="abc")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    gated = trained().set_mask_(torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0]))
    info = gated.push_to_hub("someone/gates", private=True, token="t", commit_message="gates")
    assert info.oid == "abc"
    assert calls == [
        ("token", "t"),
        ("create", "someone/gates", True, True),
        ("upload", "someone/gates", "gates", [1, 0, 0, 1, 0, 0, 1, 0]),
    ]


def test_a_name_that_is_no_folder_is_fetched_from_the_hub(tmp_path, monkeypatch):
    gated = trained()
    gated.save_pretrained(tmp_path / "cache")
    asked = []

    def download(repo_id, filename, **more):
        asked.append((repo_id, filename, more))
        return str(tmp_path / "cache" / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    again = GatedModel.from_pretrained(build("bert"), "someone/gates", revision="main")
    assert torch.equal(again.gates.log_alpha, gated.gates.log_alpha)
    assert {name for _, name, _ in asked} == {"gates.safetensors", "gate_config.json"}
    assert all((repo, more) == ("someone/gates", {"revision": "main"}) for repo, _, more in asked)
