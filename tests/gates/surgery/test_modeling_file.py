import ast
import copy
from pathlib import Path

import pytest
import torch
import transformers

from gates import modeling_pruned as pruned
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import ModelCard, load_pruned, save_pruned
from gates.surgery.modeling_file import auto_classes
from gates.surgery.remove import remove_heads_
from tests.models import build, inputs, logits, random_mask
from tools.coverage.tiny import tiny_models

HOSTILE = 'evil"\'\n"""; __import__("os").system("boom") #'


def test_the_modeling_file_holds_no_text_of_the_user(tmp_path):
    model = build("bert")
    model.config._name_or_path = HOSTILE
    model.config.id2label, model.config.label2id = {0: HOSTILE, 1: "b"}, {HOSTILE: 0, "b": 1}
    directory = tmp_path / HOSTILE.replace("/", "")
    save_pruned(model, directory, random_mask("bert"), card=ModelCard(base_model=HOSTILE, method=HOSTILE), tokenizer=None)
    text = (directory / "modeling_pruned.py").read_text()
    assert "evil" not in text
    library = Path(pruned.__file__).read_text()
    assert text.startswith(library.rstrip("\n"))
    generated = ast.parse(text[len(library.rstrip("\n")) :])
    for node in generated.body:  # if hasattr(transformers, "Name"): class Name(Pruned, transformers.Name)
        assert isinstance(node, ast.If)
        (definition,) = node.body
        assert isinstance(definition, ast.ClassDef)
        assert hasattr(transformers, definition.name)
        assert ast.unparse(node.test) == f"hasattr(transformers, {definition.name!r})"
        assert list(map(ast.unparse, definition.bases)) == ["Pruned", f"transformers.{definition.name}"]
    assert load_pruned(directory).config.id2label[0] == HOSTILE


def test_a_class_with_a_hostile_name_is_not_written(tmp_path):
    model = build("bert")
    model.__class__ = type(HOSTILE, (type(model),), {})
    save_pruned(model, tmp_path / "out", random_mask("bert"), tokenizer=None)  # as the stock class that it is
    for path in (tmp_path / "out").rglob("*"):
        assert HOSTILE.encode() not in path.read_bytes()
    assert type(load_pruned(tmp_path / "out")).__name__.endswith("BertForSequenceClassification")


def test_plain_save_pretrained_of_a_pruned_model_keeps_its_shape(tmp_path):
    """A stock class would find the first layer's weights missing and draw new ones."""
    model, batch = build("llama"), inputs("llama")
    cut = remove_heads_(model, torch.tensor([0.0, 0, 0, 0, 1, 1, 1, 1]))
    expected = logits(cut, batch)
    for saved in (cut, copy.deepcopy(cut)):
        directory = tmp_path / str(id(saved))
        saved.save_pretrained(directory)
        again = transformers.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
        torch.testing.assert_close(logits(again, batch), expected, atol=3e-6, rtol=1e-5)
        torch.testing.assert_close(logits(load_pruned(directory).eval(), batch), expected, atol=3e-6, rtol=1e-5)
    assert type(cut) is transformers.LlamaForCausalLM
    assert not hasattr(cut.config, "auto_map")


def test_a_class_that_transformers_lists_and_does_not_export_is_refused_in_one_sentence(tmp_path):
    model = next(tiny_models("voxtral_realtime_text"))
    mask = torch.ones(sum(site.heads for site in find_attention(model)))
    mask[0] = 0
    assert "AutoModel" not in auto_classes(model)
    with pytest.raises(GateError, match=type(model).__name__):
        save_pruned(model, tmp_path / "out", mask, tokenizer=None)
