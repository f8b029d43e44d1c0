import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import transformers

from gates.attention.sites import find_attention
from gates.surgery.masks import load_mask
from tests import version4
from tests.version4 import FAMILIES, SOME, WHOLE_LAYER
from training.commands.table import run_command

main = partial(run_command, "convert")
LAYOUTS = ("bert", "distilbert", "gpt2", "albert", "xlm", "vit")
"""A family of each layout; the others are relatives of these."""
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


def refused(tmp_path, capsys, *arguments):
    """Run the command on input it cannot take, and return its one sentence; nothing is written."""
    before = sorted(tmp_path.rglob("*"))
    assert main(list(map(str, arguments))) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err[:7], printed.err.count("\n")) == ("", "error: ", 1)
    assert sorted(tmp_path.rglob("*")) == before
    return printed.err


@pytest.mark.integration
def test_every_layout_loads_again_in_a_process_without_this_project(tmp_path, capsys):
    cases, inputs, expected = [], {}, {}
    ways = [(name, SOME, name == "gpt2", "pruned") for name in LAYOUTS]
    for name, removed, pickle, form in [*ways, ("bert", WHOLE_LAYER, False, "pruned"), ("bert", WHOLE_LAYER, True, "masked")]:
        family, old, new = FAMILIES[name], tmp_path / "old" / str(len(cases)), str(tmp_path / f"new{len(cases)}")
        expected[new] = version4.write(old, family, removed, pickle=pickle, old_names=pickle)
        assert main([str(old), "--output", new, "--form", form, *(["--allow_pickle"] if pickle else [])]) == 0
        assert f"{12 - sum(map(len, removed.values()))} of 12 heads; load with AutoModel" in capsys.readouterr().out
        mask = load_mask(f"{new}/mask.json", find_attention(version4.build(family)))
        gone = sorted(version4.HEADS * layer + head for layer, heads in removed.items() for head in heads)
        assert [head for head in range(12) if not mask[head]] == gone, name
        cases.append((new, family.auto, form == "pruned"))
        inputs[new] = version4.inputs(family)
    pruned, masked = (os.path.getsize(f"{new}/model.safetensors") for new, *_ in cases[-2:])
    assert pruned < masked

    (tmp_path / "cases.json").write_text(json.dumps(cases))
    torch.save(inputs, tmp_path / "inputs.pt")
    files = [str(tmp_path / name) for name in ("cases.json", "inputs.pt", "results.pt")]
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", FRESH_PROCESS, *files], capture_output=True, text=True, cwd=tmp_path, env=home)
    assert done.returncode == 0, done.stderr[-2000:]
    for directory, found in torch.load(tmp_path / "results.pt").items():
        torch.testing.assert_close(found, expected[directory], msg=lambda text, name=directory: f"{name}: {text}")


def test_the_tokenizer_comes_along_into_the_default_output(tmp_path, capsys):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME)
    (tmp_path / "old" / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
    (tmp_path / "old" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    assert main([f"{tmp_path / 'old'}/"]) == 0
    assert str(tmp_path / "old-converted") in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "old-converted")
    assert tokenizer("World hello you")["input_ids"] == [2, 6, 5, 1, 3]
    assert "exists already" in refused(tmp_path, capsys, tmp_path / "old")


def test_generation_settings_and_the_image_processor_come_along(tmp_path):
    version4.write(tmp_path / "gpt2", FAMILIES["gpt2"], SOME)
    (tmp_path / "gpt2" / "generation_config.json").write_text('{"max_new_tokens": 7, "transformers_version": "4.46.3"}')
    assert main([str(tmp_path / "gpt2"), "--output", str(tmp_path / "generator")]) == 0
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "generator").max_new_tokens == 7

    version4.write(tmp_path / "vit", FAMILIES["vit"], SOME)
    settings = {"do_resize": True, "size": 8, "image_mean": [0.1, 0.2, 0.3], "feature_extractor_type": "ViTFeatureExtractor"}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    assert main([str(tmp_path / "vit"), "--output", str(tmp_path / "new")]) == 0
    assert list(transformers.AutoImageProcessor.from_pretrained(tmp_path / "new").image_mean) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("tokenizer.json", "{", "the tokenizer files in"),
        ("preprocessor_config.json", "{", "has no image processor that can be read"),
        ("generation_config.json", "{", "generation_config.json"),
        ("config.json", "{", "not JSON"),
        ("model.safetensors", "{", "model.safetensors"),
        ("model.safetensors", None, "--allow_pickle"),
    ],
)
def test_files_that_cannot_be_read(file, text, said, tmp_path, capsys):
    version4.write(tmp_path / "old", FAMILIES["bert"], SOME, pickle=text is None)
    if text is not None:
        (tmp_path / "old" / file).write_text(text)
    assert said in refused(tmp_path, capsys, tmp_path / "old", "--output", tmp_path / "new")
