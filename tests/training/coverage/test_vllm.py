import importlib.util
import os
import sys

import pytest
import torch

from gates.export.checkpoint import save_pruned
from training.commands.table import run_command
from training.coverage import architectures as zoo
from training.coverage import vllm
from training.coverage.in_vllm import heads_by_layer
from training.coverage.routes import BY_LAYER
from training.coverage.vllm_process import RefusedError, loaded, opened

PYTHON = os.environ.get("HEAD_GATES_VLLM_PYTHON")
"""Of an environment with vLLM."""
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="HEAD_GATES_VLLM_PYTHON names no Python that has vLLM")
LLAMA = zoo.BY_NAME["Llama"]

STAND_IN = '''
import os

__version__ = "0.0"

class SamplingParams:
    def __init__(self, **options):
        self.options = options

class LLM:
    """Says by its probabilities what it was given."""

    def __init__(self, model, **options):
        print("loading", model)
        self.options = options
        if "broken" in model:
            raise RuntimeError("it does not load\\nat all")
        if "mute" in model:
            assert 1 + 1 == 3
        if "dies" in model:
            os._exit(7)

    def generate(self, texts, parameters, use_tqdm):
        class One: pass
        layers = self.options.get("hf_overrides", {}).get("per_layer_config", {})
        heads = [layers[layer]["num_attention_heads"] for layer in sorted(layers)]
        step = {}
        for token, value in enumerate([len(texts), parameters.options["max_tokens"], *heads]):
            step[token] = One()
            step[token].logprob = -value
        written = One()
        written.token_ids, written.logprobs = (5,), [step]
        result = One()
        result.outputs = [written]
        return [result]
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """This interpreter with a package of vLLM's name that computes nothing."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with opened(sys.executable) as process:
        yield process


@pytest.fixture(scope="module")
def installed():
    with opened(PYTHON) as process:
        assert not process.missing
        yield process


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("kind", vllm.KINDS)
def test_vllm_says_what_the_gated_model_says(installed, kind):
    found = vllm.try_vllm(installed, LLAMA, kind)
    own, transformers = found["auto"], found["transformers"]
    if kind == "a layer without heads":
        assert own.startswith("no: RuntimeError")
        assert "Layer 0 does not dispatch" in transformers
        return
    assert transformers.startswith("yes, differs by ")
    assert float(transformers.rpartition(" ")[2]) < 1e-5
    assert own.startswith("no: RuntimeError" if kind == vllm.DIFFER else "yes, differs by ")


@needs_vllm
@pytest.mark.slow
def test_another_model_is_told_apart(installed, tmp_path):
    """The comparison could fail: with a head less in what vLLM has, it does."""
    model = zoo.build(vllm.wide(LLAMA))
    other = torch.ones(8)
    other[3] = 0.0
    save_pruned(zoo.build(vllm.wide(LLAMA)), tmp_path / "other", other, form="stock", pad_heads=True, tokenizer=None)
    ids = torch.arange(3, 11)[None]
    assert vllm.difference(installed, tmp_path / "other", "auto", model, torch.ones(8), ids) > 1e-2
    assert vllm.difference(installed, tmp_path / "other", "auto", model, other, ids) < 1e-5


def test_requests_and_answers(stand_in, tmp_path):
    assert stand_in.versions["vllm"] == "0.0"
    assert stand_in.versions["torch"] == torch.__version__
    (tmp_path / "config.json").write_text("{}")
    with loaded(stand_in, tmp_path, "auto") as name:
        answer = stand_in.ask(ask=name, texts=[[3, 4], [5]], new=4, vocabulary=50)
        again = stand_in.ask(ask=name, texts=[[3, 4]], new=1, vocabulary=0)
    assert (answer["tokens"], answer["probabilities"]) == ([[5]], [{"0": -2, "1": -4}])
    assert again["probabilities"] == [{"0": -1, "1": -1}]


def test_the_heads_of_each_layer_are_told(stand_in, tmp_path):
    """Of those that lost some, by the layer's number; names sort ``layers.10`` before ``layers.2``."""
    model = zoo.build(zoo.Architecture("Llama", "ForCausalLM", {**zoo.GROUPED_EXPLICIT, "num_hidden_layers": 11}))
    mask = torch.ones(44)
    mask[8:11] = mask[40] = 0.0  # of layers 2 and 10
    save_pruned(model, tmp_path / "export", mask, form="pruned", tokenizer=None)
    with loaded(stand_in, tmp_path / "export", "transformers") as name:
        heads = stand_in.ask(ask=name, texts=[[3]], new=1, vocabulary=1)["probabilities"][0]
    assert list(heads.values())[2:] == [-1, -3]
    with loaded(stand_in, tmp_path / "export", "auto") as name:  # whose classes read no such thing
        assert len(stand_in.ask(ask=name, texts=[[3]], new=1, vocabulary=1)["probabilities"][0]) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "RuntimeError: it does not load"),
        ("mute", "AssertionError: assert 1 + 1 == 3"),
        ("dies", "its process ended with exit code 7"),
    ],
)
def test_what_vllm_says_is_said(stand_in, tmp_path, name, message):
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(RefusedError, match=f"^{message}$".replace("+", "[+]")), loaded(stand_in, tmp_path / name, "auto"):
        pass
    (tmp_path / "config.json").write_text("{}")
    with loaded(stand_in, tmp_path, "auto"):  # and others still load
        pass


def test_query_and_key_value_heads_by_layer():
    shapes = {"layers.10.self_attn": {"heads": 3, "kv_heads": 1}, "layers.2.self_attn": {"heads": 4, "kv_heads": 2}}
    told = heads_by_layer(shapes)
    assert told["per_layer_config"] == {
        10: {"num_attention_heads": 3, "num_key_value_heads": 1},
        2: {"num_attention_heads": 4, "num_key_value_heads": 2},
    }


def test_without_an_interpreter_the_table_says_so(capsys):
    assert run_command("deployment", ["--tables", "[vllm]", "--only", "[Mixtral]"]) == 0
    rows = capsys.readouterr().out.strip().splitlines()[-2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| Mixtral, {name}" for name in vllm.BACKENDS]
    assert all(row.count("not tried: no --vllm_python") == len(vllm.KINDS) for row in rows)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_interpreter_without_vllm(capsys):
    assert run_command("deployment", ["--tables", "[vllm]", "--only", "[Mixtral]", "--vllm_python", sys.executable]) == 0
    assert "not tried: ModuleNotFoundError: No module named 'vllm' |" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["no/such/python", ".", "/bin/false", "/bin/echo", "./notes"])
def test_what_is_no_interpreter_is_refused(capsys, tmp_path, monkeypatch, path):
    """Also a program that says something else, and a file that may be run but is no program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("of a year")
    (tmp_path / "notes").chmod(0o755)
    assert run_command("deployment", ["--tables", "[routes]", "--only", "[Llama]", "--vllm_python", path]) == 2
    assert f"--vllm_python is '{path}', which does not run as Python 3.11" in " ".join(capsys.readouterr().err.split())


def test_a_process_that_has_ended_refuses_what_is_asked(tmp_path, monkeypatch):
    """As where the system ended it for its memory, in the middle of a table."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with opened(sys.executable) as process:
        assert not process.missing
        process._process.kill()
        process._process.wait()
        for _ in range(2):
            with pytest.raises(RefusedError), loaded(process, tmp_path, "auto"):
                pass


def test_masks_of_the_columns():
    heads = [4, 4]
    assert vllm.halved(heads).tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    assert vllm.without_first(heads).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert {family.name for family in BY_LAYER} <= {family.name for family in vllm.FAMILIES}
    assert all("head_dim" in vllm.wide(family).config for family in vllm.FAMILIES)
