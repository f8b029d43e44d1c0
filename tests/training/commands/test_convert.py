import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers

from gates.export.checkpoint import load_pruned
from gates.sites import find_attention
from gates.surgery.masks import load_mask
from tests import version4
from tests.version4 import FAMILIES, SOME, WHOLE_LAYER
from training.commands.table import run_command

main = partial(run_command, "convert")
IN_EVERY_WAY = ("bert", "roberta", "distilbert", "gpt2")
"""Families that are converted to every form and from every kind of file."""
ONCE = ("albert", "xlm", "vit")
"""Families of other layouts; the others are relatives of these and of BERT."""

FRESH_PROCESS = """
import json, sys, torch, transformers

sys.modules["gates"] = sys.modules["training"] = None  # importing this project is an error
transformers.utils.logging.disable_progress_bar()
results = {}
for directory, auto, remote in json.load(open(sys.argv[1])):
    model = getattr(transformers, auto).from_pretrained(directory, trust_remote_code=remote).eval()
    with torch.no_grad():
        results[directory] = model(**torch.load(sys.argv[2])[directory])[0]
torch.save(results, sys.argv[3])
"""


def tree(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def refused(tmp_path, capsys, *arguments):
    """Run the command on input it cannot take; returns its one sentence."""
    before = tree(tmp_path)
    assert main(list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert tree(tmp_path) == before
    return printed.err


def test_every_layout_loads_again_in_a_process_without_this_project(tmp_path, capsys):
    cases, inputs, expected, sizes = [], {}, {}, {}
    for name in (*IN_EVERY_WAY, *ONCE):
        family = FAMILIES[name]
        for removed, pickle, form in (
            (SOME, False, "pruned"),
            (SOME, True, "pruned"),
            (WHOLE_LAYER, False, "pruned"),
            (WHOLE_LAYER, True, "masked"),
        )[: 4 if name in IN_EVERY_WAY else 1]:
            old, new = tmp_path / "old" / str(len(cases)), tmp_path / "new" / str(len(cases))
            logits = version4.write(old, family, removed, pickle=pickle, old_names=pickle)
            flags = ["--allow_pickle"] if pickle else []
            assert main([str(old), "--output", str(new), "--form", form, *flags]) == 0
            assert f"{12 - sum(map(len, removed.values()))} of 12 heads; load with AutoModel" in capsys.readouterr().out
            mask = load_mask(new / "mask.json", find_attention(version4.build(family)))
            assert [head for head in range(12) if not mask[head]] == sorted(
                version4.HEADS * layer + head for layer, heads in removed.items() for head in heads
            ), name
            assert "pruned_heads" not in json.loads((new / "config.json").read_text())
            cases.append((str(new), family.auto, form == "pruned"))
            inputs[str(new)], expected[str(new)] = version4.inputs(family), logits
            if removed is WHOLE_LAYER:
                sizes.setdefault(name, []).append(os.path.getsize(new / "model.safetensors"))

    (tmp_path / "cases.json").write_text(json.dumps(cases))
    torch.save(inputs, tmp_path / "inputs.pt")
    files = [str(tmp_path / name) for name in ("cases.json", "inputs.pt", "results.pt")]
    command = [sys.executable, "-c", FRESH_PROCESS, *files]
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=home)
    assert done.returncode == 0, done.stderr[-2000:]
    results = torch.load(tmp_path / "results.pt")
    assert results.keys() == expected.keys()
    for directory, logits in expected.items():
        torch.testing.assert_close(results[directory], logits, msg=lambda text, name=directory: f"{name}: {text}")
    assert all(pruned < masked for pruned, masked in sizes.values())  # both without one layer's heads


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {*IN_EVERY_WAY, *ONCE}))
def test_their_relatives_are_converted(name, tmp_path):
    expected = version4.write(tmp_path / "old", FAMILIES[name], SOME)
    assert main([str(tmp_path / "old"), "--output", str(tmp_path / "new")]) == 0
    with torch.no_grad():
        found = load_pruned(tmp_path / "new").eval()(**version4.inputs(FAMILIES[name]))[0]
    torch.testing.assert_close(found, expected)


def test_the_default_output_lies_beside_the_input_and_is_checked(tmp_path, capsys):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    assert main([f"{tmp_path / 'old'}/"]) == 0
    assert str(tmp_path / "old-converted") in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["old", "old-converted"]
    assert "exists already" in refused(tmp_path, capsys, tmp_path / "old")


def test_the_tokenizer_and_the_generation_settings_come_along(tmp_path):
    version4.write(tmp_path / "bert", FAMILIES["bert"], SOME)
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
    (tmp_path / "bert" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    assert main([str(tmp_path / "bert"), "--output", str(tmp_path / "new")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer("World hello you")["input_ids"] == [2, 6, 5, 1, 3]

    version4.write(tmp_path / "gpt2", FAMILIES["gpt2"], SOME)
    (tmp_path / "gpt2" / "generation_config.json").write_text('{"max_new_tokens": 7, "transformers_version": "4.46.3"}')
    assert main([str(tmp_path / "gpt2"), "--output", str(tmp_path / "generator")]) == 0
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "generator").max_new_tokens == 7


def test_the_image_processor_comes_along(tmp_path, capsys):
    version4.write(tmp_path / "vit", FAMILIES["vit"], SOME)
    settings = {"do_resize": True, "size": 8, "image_mean": [0.1, 0.2, 0.3], "feature_extractor_type": "ViTFeatureExtractor"}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    assert main([str(tmp_path / "vit"), "--output", str(tmp_path / "new")]) == 0
    assert list(transformers.AutoImageProcessor.from_pretrained(tmp_path / "new").image_mean) == [0.1, 0.2, 0.3]
    capsys.readouterr()
    (tmp_path / "vit" / "preprocessor_config.json").write_text("{")
    assert "has no image processor that can be read" in refused(
        tmp_path, capsys, tmp_path / "vit", "--output", tmp_path / "other"
    )


def test_a_config_that_cannot_be_converted_is_one_sentence(tmp_path, capsys):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    version4.edit_config(tmp_path / "old", pruned_heads={"0": [1], "2": [0]})
    said = refused(tmp_path, capsys, tmp_path / "old", "--output", tmp_path / "new")
    assert "config and weights are not of one checkpoint" in said


def test_files_that_cannot_be_read(tmp_path, capsys):
    out = ("--output", tmp_path / "new")
    assert "does not exist" in refused(tmp_path, capsys, tmp_path / "absent", *out)
    version4.write(tmp_path / "pickle", FAMILIES["bert"], SOME, pickle=True)
    assert "--allow_pickle" in refused(tmp_path, capsys, tmp_path / "pickle", *out)

    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    weights = tmp_path / "old" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "truncated" in refused(tmp_path, capsys, tmp_path / "old", *out)
    weights.unlink()
    assert "has no weights" in refused(tmp_path, capsys, tmp_path / "old", *out)
    weights.write_bytes(whole)

    (tmp_path / "old" / "tokenizer.json").write_text("{")
    assert "the tokenizer files in" in refused(tmp_path, capsys, tmp_path / "old", *out)
    (tmp_path / "old" / "tokenizer.json").unlink()
    (tmp_path / "old" / "generation_config.json").write_text("{")
    assert "generation_config.json" in refused(tmp_path, capsys, tmp_path / "old", *out)
    (tmp_path / "old" / "generation_config.json").unlink()
    (tmp_path / "new").write_text("")
    assert "exists already" in refused(tmp_path, capsys, tmp_path / "old", *out)
    assert refused(tmp_path, capsys, tmp_path / "old", "--output", tmp_path / "new" / "below")
    (tmp_path / "old" / "config.json").write_text("{")
    assert "not JSON" in refused(tmp_path, capsys, tmp_path / "old", *out)


class Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_hostile_pickle_is_not_executed(tmp_path, capsys):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME, pickle=True)
    torch.save({"weight": Hostile(tmp_path / "executed")}, tmp_path / "old" / "pytorch_model.bin")
    assert "was not read" in refused(tmp_path, capsys, tmp_path / "old", "--output", tmp_path / "new", "--allow_pickle")
