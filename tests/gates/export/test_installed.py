"""Pruned models load through Auto classes by the installed package, without code from their directory."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import gates
from gates.errors import GateError
from gates.export.checkpoint import own_auto_class, save_pruned
from gates.export.safe_load import CHECKSUM_FILE
from gates.gating.head_gates import HeadGates
from gates.surgery.modeling_file import MODELING_FILE, auto_classes
from tests.gates.chosen import chosen
from tests.models import run_fresh
from tools.coverage import architectures as zoo

ROOT = str(Path(__file__).parents[3])
FAMILIES = ("Llama", "Gemma3", "Bart", "ViT", "Mixtral", "CLIP", "Bloom")
FRESH = """
import sys
import torch
import gates
from transformers import AutoModelForCausalLM

print(hasattr(AutoModelForCausalLM._model_mapping, "gives_both"))
gates.register()
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder + "/export").eval()
    known = torch.load(folder + "/known.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(model(**known["batch"])[0], known["output"], atol=1e-6, rtol=1e-6)
    print([site.heads for site in gates.find_attention(model)])
print("transformers_modules" in " ".join(sys.modules))
"""


def uneven_mask(architecture):
    """One head less in every site, another one each time, and two less in the first."""
    mask = torch.ones(architecture.heads // 4, 4)
    mask[torch.arange(len(mask)), torch.arange(len(mask)) % 4] = 0.0
    mask[0, 2] = 0.0
    return mask.flatten()


def exported(name, folder, **more):
    architecture = zoo.BY_NAME[name]
    model = zoo.build(architecture)
    batch = zoo.inputs(architecture)
    mask = uneven_mask(architecture)
    save_pruned(model, folder / "export", mask, tokenizer=None, check_batch=batch, **more)
    head_gates = HeadGates(model)
    with head_gates.attached(), head_gates.use(mask), torch.no_grad():
        return model, batch, model(**batch)[0]


@pytest.mark.integration
def test_uneven_heads_load_in_a_fresh_process_without_remote_code(tmp_path):
    """Nothing is registered by the import, and no code of the directories runs."""
    for name in ("Llama", "Gemma3"):
        _, batch, output = exported(name, tmp_path / name)
        (tmp_path / name / "export" / CHECKSUM_FILE).unlink()
        (tmp_path / name / "export" / MODELING_FILE).write_text("raise SystemExit('code of the directory ran')\n")
        torch.save({"batch": batch, "output": output}, tmp_path / name / "known.pt")
    said = run_fresh(FRESH, tmp_path / "Llama", tmp_path / "Gemma3", folder=tmp_path, PYTHONPATH=ROOT)
    assert said.splitlines() == ["False", "[2, 3]", "[2, 3]", "False"]


@pytest.mark.parametrize("name", chosen(FAMILIES, fast=["Llama"], integration=["Bart", "ViT", "Mixtral"]))
def test_every_auto_class_loads_as_by_remote_code(tmp_path, registered, name):
    """The same weights under the same names in the same shapes, or a refusal by both."""
    model, batch, output = exported(name, tmp_path)
    own = getattr(transformers, own_auto_class(model)).from_pretrained(tmp_path / "export").eval()
    with torch.no_grad():
        torch.testing.assert_close(own(**batch)[0], output, atol=1e-5, rtol=1e-4)
    for auto_name in auto_classes(model):
        auto = getattr(transformers, auto_name)
        found = []
        for trusts in (False, True):
            try:
                loaded, info = auto.from_pretrained(
                    str(tmp_path / "export"), trust_remote_code=trusts, output_loading_info=True
                )
            except ValueError as error:
                found.append(str(error))
                continue
            drawn = info["missing_keys"]
            found.append({key: tensor for key, tensor in loaded.state_dict().items() if key not in drawn})
            assert type(loaded).__module__.startswith("transformers_modules") == trusts
        assert type(found[0]) is type(found[1]), auto_name
        if isinstance(found[0], str):
            assert found[0] == found[1]
        else:
            torch.testing.assert_close(found[0], found[1], atol=0, rtol=0, msg=auto_name)


def test_models_that_were_not_pruned_load_as_before(tmp_path, registered):
    model = zoo.build(zoo.BY_NAME["Llama"])
    model.save_pretrained(tmp_path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not info["missing_keys"]
    assert type(transformers.AutoModel.from_config(model.config)) is transformers.LlamaModel


def test_code_of_others_is_run_when_it_is_trusted(tmp_path, registered):
    """A stock type with a modeling file of its own is none of this package's business."""
    zoo.build(zoo.BY_NAME["Llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_other.Other"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_other.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass Other(LlamaForCausalLM):\n    pass\n"
    )
    auto = transformers.AutoModelForCausalLM
    assert type(auto.from_pretrained(tmp_path, trust_remote_code=True)).__name__ == "Other"
    assert type(auto.from_pretrained(tmp_path)) is transformers.LlamaForCausalLM


def test_what_was_registered_before_and_is_registered_later_stays(registered):
    class OwnConfig(transformers.PreTrainedConfig):
        model_type = "own_of_this_test"

    class Own(transformers.PreTrainedModel):
        config_class = OwnConfig

    transformers.AutoModel.register(OwnConfig, Own)
    gates.register()
    assert transformers.AutoModel._model_mapping[OwnConfig] is Own
    del transformers.AutoModel._model_mapping._extra_content[OwnConfig]


def test_a_pipeline_takes_the_directory(tmp_path, registered):
    architecture = zoo.BY_NAME["Bert"]
    model = transformers.BertForSequenceClassification(zoo.build(architecture).config)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    tokenizer = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    save_pruned(model, tmp_path / "export", uneven_mask(architecture), tokenizer=tokenizer)
    (answer,) = transformers.pipeline("text-classification", model=str(tmp_path / "export"))("good bad")
    assert answer["label"] in ("LABEL_0", "LABEL_1")


@pytest.mark.parametrize("damage", ["config", "weights"])
def test_a_hostile_or_damaged_directory_is_refused(tmp_path, registered, damage):
    exported("Llama", tmp_path)
    folder = tmp_path / "export"
    if damage == "config":
        (folder / CHECKSUM_FILE).unlink()
        config = json.loads((folder / "config.json").read_text())
        next(iter(config["pruned_attention"].values()))["attributes"]["__class__"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    else:
        weights = bytearray((folder / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(GateError, match="__class__" if damage == "config" else "damaged"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
