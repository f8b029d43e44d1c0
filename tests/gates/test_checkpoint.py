import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from gates import checkpoint
from gates.attach import HeadGates
from gates.checkpoint import ModelCard, auto_classes, load_pruned, save_pruned
from gates.errors import GateError
from gates.masks import load_mask
from gates.sites import find_attention
from tests.models import FAMILIES, build, inputs, logits, random_mask

FRESH_PROCESS = """
import json, sys, torch, transformers
sys.modules["gates"] = sys.modules["training"] = None  # importing this project is an error
transformers.utils.logging.disable_progress_bar()
results = {}
for case in json.load(open(sys.argv[1])):
    auto = getattr(transformers, case["auto"])
    model = auto.from_pretrained(case["directory"], trust_remote_code=case["remote"]).eval()
    inputs = torch.load(case["inputs"])
    with torch.no_grad():
        results[case["directory"]] = model(**inputs)[0]
torch.save(results, sys.argv[2])
"""


def own_auto_class(model):
    return next(auto for auto, stock in auto_classes(model).items() if stock is type(model))


def save(name, directory, **more):
    model, mask = build(name), random_mask(name)
    return model, mask, save_pruned(model, directory, mask, check_batch=inputs(name), **more)


def test_every_family_reloads_in_a_process_without_this_project(tmp_path):
    cases, expected = [], {}
    for name in FAMILIES:
        model, mask, _ = save(name, tmp_path / name)
        gates = HeadGates(model)
        with gates.attached(), gates.use(mask):
            reference = logits(model, inputs(name))
        torch.save(inputs(name), tmp_path / f"{name}.pt")
        for form, remote in (("pruned", True), ("masked", False)):
            directory = tmp_path / (name if form == "pruned" else f"{name}-masked")
            if form == "masked":
                save(name, directory, form="masked")
            case = {"auto": own_auto_class(model), "directory": str(directory), "remote": remote}
            cases.append(case | {"inputs": str(tmp_path / f"{name}.pt")})
            expected[str(directory)] = reference
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "cases.json"), str(tmp_path / "results.pt")]
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=home, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "results.pt")
    assert found.keys() == expected.keys()
    for directory, reference in expected.items():
        torch.testing.assert_close(found[directory], reference, atol=5e-6, rtol=1e-5, msg=directory)


def test_folded_gate_values_survive(tmp_path):
    model, mask = build("bert"), random_mask("bert")
    values = torch.rand(8)
    gates = HeadGates(model)
    with gates.attached(), gates.use(mask * values):
        expected = logits(model, inputs("bert"))
    save_pruned(model, tmp_path / "out", mask, values=values)
    torch.testing.assert_close(logits(load_pruned(tmp_path / "out").eval(), inputs("bert")), expected, atol=3e-6, rtol=1e-5)


def test_saving_does_not_change_the_model(tmp_path):
    model = build("bert")
    expected = logits(model, inputs("bert"))
    save_pruned(model, tmp_path / "out", random_mask("bert"))
    assert torch.equal(logits(model, inputs("bert")), expected)
    assert not hasattr(model.config, "pruned_attention")
    assert not hasattr(model.config, "auto_map")


def test_the_directory_holds_mask_and_card(tmp_path):
    card = ModelCard(base_model="someone/model", method="his", metrics={"accuracy": 0.875}, versions={"torch": "2.x"})
    model, mask, directory = save("bert", tmp_path / "out", card=card)
    assert torch.equal(load_mask(directory / "mask.json", find_attention(model)), mask)
    text = (directory / "README.md").read_text()
    for part in ("someone/model", "his", "0.875", "2.x", "4 of 8", "trust_remote_code=True"):
        assert part in text
    assert {path.name for path in directory.iterdir()} >= {"config.json", "model.safetensors", "modeling_pruned.py"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_taken_directory_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("precious")
    with pytest.raises(GateError, match="exists already"):
        save("bert", tmp_path / "out")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "precious"


def test_nothing_is_kept_when_the_reloaded_model_differs(tmp_path, monkeypatch):
    def spoiled(*arguments, **more):
        model = load_pruned(*arguments, **more)
        with torch.no_grad():
            model.classifier.bias.add_(1.0)
        return model

    monkeypatch.setattr(checkpoint, "load_pruned", spoiled)
    with pytest.raises(GateError, match="differs"):
        save("bert", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncate", "delete", "config"])
def test_damaged_directories_are_refused(tmp_path, damage):
    _, _, directory = save("bert", tmp_path / "out")
    weights = directory / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-500])
    elif damage == "delete":
        weights.unlink()
    else:
        (directory / "config.json").write_text("{")
    with pytest.raises(GateError, match="out"):
        load_pruned(directory)


def test_the_modeling_file_holds_no_text_of_the_user(tmp_path):
    model = build("bert")
    model.config._name_or_path = 'evil"; import os; os.system("boom") #'
    card = ModelCard(base_model='evil"""; raise SystemExit')
    save_pruned(model, tmp_path / "out", random_mask("bert"), card=card)
    text = (tmp_path / "out" / "modeling_pruned.py").read_text()
    assert "evil" not in text
    library = Path(checkpoint.pruned.__file__).read_text().replace("import torch\n", "import torch\nimport transformers\n", 1)
    assert text.startswith(library.rstrip("\n"))


def test_an_encoder_decoders_causal_lm_class_is_not_offered(tmp_path):
    """``BartForCausalLM`` has no encoder, so a shape that names encoder layers cannot be given to it."""
    _, _, directory = save("bart", tmp_path / "out")
    offered = json.loads((directory / "config.json").read_text())["auto_map"]
    assert "AutoModelForSeq2SeqLM" in offered
    assert "AutoModelForCausalLM" not in offered
    for auto in offered:
        getattr(transformers, auto).from_pretrained(directory, trust_remote_code=True)
