"""Every part of notebooks/gpu.sh is a command that its line's checks take; nothing is trained."""

import gzip
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools.benchmark.__main__ import parser_of
from training.commands.table import COMMANDS, load, read
from training.comparison.methods import parse_methods
from training.config import ComparisonOptions, Setup, group_of

ROOT = Path(__file__).parents[1]
PARTS = ("fit", "sst2", "encoder", "all", "gpt", "groups", "benchmark")


@pytest.fixture
def machine(tmp_path):
    """A folder with small files of the names that the script reads, a model's folder, and a program that says how it was
    started in place of Python."""
    for name in ("sst2/dev.tsv", "sst2/test.tsv", "sst2/train.tsv.gz"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        rows = "sentence\tlabel\n" + "".join(
            f"the fox sees {word}\t{label}\n" for word, label in [("basil", 1), ("iron", 0)] * 10
        )
        path.write_bytes(gzip.compress(rows.encode()) if name.endswith(".gz") else rows.encode())
    for folder, names in {
        "multi30k": [f"{split}.{language}.gz" for split in ("train", "val", "test_2016_flickr") for language in ("en", "de")],
        "novels": ["train.txt", "valid.txt", "test.txt"],
    }.items():
        (tmp_path / folder).mkdir()
        for name in names:
            text = b"The fox sees the basil.\n"
            (tmp_path / folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    model = tmp_path / "model"
    model.mkdir()
    fields = {"model_type": "bert", "num_hidden_layers": 6, "num_attention_heads": 12, "hidden_size": 384}
    (model / "config.json").write_text(json.dumps(fields))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]"}))
    (model / "vocab.txt").write_text("[PAD]\n")
    (model / "model.safetensors").write_bytes(b"")
    (tmp_path / "says").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "says").chmod(0o755)
    return tmp_path


def started(machine, part, *further, program="says", minutes="1"):
    """The script, and what it says."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(machine / program), "ACCELERATOR": "cpu", "MINUTES": minutes}
    line = ["bash", str(ROOT / "notebooks" / "gpu.sh"), part, str(machine / "out"), str(machine), *further]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part", PARTS)
def test_options_of_a_part_are_those_of_its_command(part, machine, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = started(machine, part, *([str(machine / "model")] if part == "sst2" else []))
    assert done.returncode == 0, done.stderr
    dash_m, module, *given = done.stdout.splitlines()
    if part == "benchmark":
        assert (dash_m, module) == ("-m", "tools.benchmark")
        assert parser_of().parse_args(given).run_dir == machine / "out" / part
        return
    name = "fit" if module == "training.fit" else given.pop(0)
    assert (dash_m, module) == ("-m", "training.fit" if name == "fit" else "training")
    times = Counter(argument for argument in given if argument.startswith("--"))
    assert set(times.values()) == {1}, times
    assert given[given.index("--run_dir") + 1] == str(machine / "out" / part)
    line = read(name, given)
    load(COMMANDS[name].check)(line)
    if name == "compare":
        asked = group_of(ComparisonOptions, line.options)
        assert asked.all_seeds == list(range(3 if part in ("gpt", "groups") else 5))
        assert parse_methods(asked.all_methods)


def test_the_tests_run_on_the_device_of_the_parts(machine):
    (machine / "says").write_text('#!/bin/sh\nprintf \'%s\\n\' "$HEAD_GATES_GPU_TESTS_ON" "$@"\n')
    done = started(machine, "tests", "--maxfail=1")
    assert done.stdout.split()[:6] == ["cpu", "-m", "pytest", "-q", "-m", "gpu"], done.stderr
    assert done.stdout.split()[-1] == "--maxfail=1"


def test_texts_of_another_kind_are_judged_where_they_are(machine, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "--data.more_tests" not in started(machine, "gpt").stdout
    (machine / "novels" / "brown.txt").write_text("The jury said Friday .\n")
    given = started(machine, "gpt").stdout.splitlines()
    line = read("compare", given[3:])
    load(COMMANDS["compare"].check)(line)
    assert Setup.of(line.options).data.files["test_brown"] == str(machine / "novels" / "brown.txt")


def test_a_fit_goes_on_once_it_has_begun(machine):
    assert started(machine, "fit").stdout.splitlines()[4:6] == ["--existing", "refuse"]
    (machine / "out" / "fit").mkdir(parents=True)
    assert started(machine, "fit").stdout.splitlines()[4:6] == ["--existing", "refuse"]
    (machine / "out" / "fit" / "config.yaml").write_text("")
    assert started(machine, "fit").stdout.splitlines()[4:6] == ["--existing", "resume"]


@pytest.mark.parametrize("code", [124, 137, 2])
def test_what_is_not_finished_is_said(code, machine):
    """124 is of a process that ended when it was told to, 137 of one that had to be killed."""
    (machine / "ends").write_text(f"#!/bin/sh\nexit {code}\n")
    (machine / "ends").chmod(0o755)
    done = started(machine, "fit", program="ends")
    assert done.returncode == code
    assert ("the same command continues" in done.stdout) == (code != 2)
