"""Exports load as every class that a stock checkpoint loads as, or are refused, but never with weights drawn anew unasked."""

import copy
import inspect
import re

import pytest
import torch
import transformers
from transformers.models.auto import auto_factory

from gates.attention.inputs import example_inputs
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import load_pruned, save_pruned
from gates.surgery.modeling_file import auto_classes
from gates.surgery.remove import remove_heads_, zero_heads_
from tests.gates.chosen import architectures
from tools.coverage import architectures as zoo

FULL_SIZE = ("SeamlessM4T", "SeamlessM4Tv2")
"""Whose base class has towers that no config field makes small enough."""
UNLIKE_STOCK = {"Llama", "Qwen2", "Qwen3", "SmolLM3", "Qwen3Moe"}
"""Their class for question answering names the base model otherwise, so a stock checkpoint of theirs loads with new layers."""


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """AutoBackbone asks the hub whether a directory is there."""
    monkeypatch.setattr(auto_factory, "hf_api", lambda: type("Api", (), {"repo_exists": lambda *_: True}))


def some_heads(model):
    """A mask that empties the first site and drops one head of every other."""
    heads = [site.heads for site in find_attention(model)]
    return torch.cat([torch.zeros(heads[0]), *(torch.tensor([0.0] + [1.0] * (count - 1)) for count in heads[1:])])


def inputs(architecture, model):
    if architecture.input == "image-and-text":
        known = inspect.signature(model.forward).parameters
        return {name: tensor for name, tensor in zoo.inputs(architecture).items() if name in known}
    batch = example_inputs(model, length=8)
    if architecture.name == "LayoutLM":
        batch["bbox"] = torch.zeros(*batch["input_ids"].shape, 4, dtype=torch.long)
    return batch


def tensors(output):
    """All floating tensors of a model's output."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else []
    return [tensor for value in values for tensor in tensors(value)]


def saved_classes(architecture):
    """The row's own class and its base class, as far as they differ."""
    model = zoo.build(architecture)
    return {saved for saved in (type(model), auto_classes(model)["AutoModel"]) if is_covered(saved(model.config))}


def is_covered(model):
    """Whether all attention of a model has gates: the base class may have parts that the row's own class has not."""
    try:
        return bool(find_attention(model))
    except GateError:
        return False


@torch.no_grad()
def compare_with_stock(architecture, saved_class, folder):
    """Load the dense model with zeroed heads and the export through every Auto class.

    Returns how many classes loaded and the sentences that refused others.
    """
    model = zoo.randomise_(saved_class(zoo.build(architecture).config)).eval()
    mask = some_heads(model)
    zero_heads_(copy.deepcopy(model), mask).save_pretrained(folder / "stock")
    remove_heads_(copy.deepcopy(model), mask).save_pretrained(folder / "export")
    loaded, refused = 0, []
    for name in auto_classes(model):
        auto = getattr(transformers, name)
        try:
            expected, info = auto.from_pretrained(str(folder / "stock"), output_loading_info=True)
        except ValueError:  # not with these files, such as Qwen's decision model
            continue
        try:
            export = str(folder / "export")
            found, found_info = auto.from_pretrained(export, trust_remote_code=True, output_loading_info=True)
        except ValueError as error:
            refused.append(str(error))
            assert info["missing_keys"], name
            continue
        assert found_info["missing_keys"] == info["missing_keys"], name
        for key in info["missing_keys"]:
            new = expected.get_parameter_or_buffer(key)
            if new.is_floating_point():  # Transformers leaves some biases as the memory was, such as Data2VecText's
                new.normal_(std=0.1)
            found.get_parameter_or_buffer(key).copy_(new)
        if not name.endswith("XVector"):  # needs more sound than these inputs have, and PEFT
            try:
                batch, results = inputs(architecture, expected), []
            except GateError:  # such as Splinter's pretraining, which wants question tokens
                continue
            for loaded_model in (expected, found):
                torch.manual_seed(0)
                results.append(tensors(dict(loaded_model.eval()(**batch))))
            assert results[0]
            for left, right in zip(*results, strict=True):
                if left.shape == right.shape:  # but for caches, which are smaller
                    torch.testing.assert_close(right, left, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        loaded += 1
    return loaded, refused


@pytest.mark.parametrize(
    "name",
    architectures(
        fast=(),
        integration=("ViT", "NomicBert", "Mixtral", "Bart", "CLIP"),
        only=lambda row: not row.gate_only and row.name not in FULL_SIZE,
    ),
)
def test_exports_load_as_what_a_stock_checkpoint_loads_as(tmp_path, name):
    """With the same missing keys and the same outputs, new heads aside, which are drawn anew in both."""
    architecture = zoo.BY_NAME[name]
    is_encoder_decoder = architecture.input in ("text-to-text", "audio-to-text")
    for saved_class in saved_classes(architecture):
        folder = tmp_path / saved_class.__name__
        loaded, refused = compare_with_stock(architecture, saved_class, folder)
        assert loaded
        assert all(re.fullmatch(r"\w+ needs '\S+' \(one of \d+\), which .* load it as \w+", sentence) for sentence in refused)
        if not is_encoder_decoder:
            assert len(refused) == (architecture.name in UNLIKE_STOCK and saved_class.__name__.endswith("ForCausalLM"))


@pytest.fixture
def export(tmp_path):
    model = zoo.build(zoo.BY_NAME["Bert"])
    return save_pruned(model, tmp_path / "export", some_heads(model), tokenizer=None)


def test_new_heads_are_made_only_when_asked_for(export):
    with pytest.raises(GateError, match=r"BertForTokenClassification has 'classifier.bias' and 1 more.*new_heads=True"):
        load_pruned(export, model_class=transformers.BertForTokenClassification)
    assert load_pruned(export, model_class=transformers.BertForTokenClassification, new_heads=True).num_labels == 2
    load_pruned(export, model_class=transformers.BertForMaskedLM)


def test_weights_that_the_saved_model_has_are_never_drawn_anew(tmp_path):
    model = zoo.build(zoo.BY_NAME["Llama"])
    export = save_pruned(model, tmp_path / "export", some_heads(model), tokenizer=None)
    with pytest.raises(GateError, match="cannot be loaded: LlamaForQuestionAnswering needs 'transformer"):
        load_pruned(export, model_class=transformers.LlamaForQuestionAnswering, new_heads=True)
    masked = save_pruned(model, tmp_path / "masked", some_heads(model), form="masked", tokenizer=None)
    with pytest.raises(GateError, match=r"lack 'transformer.*load them as LlamaForCausalLM"):
        load_pruned(masked, model_class=transformers.LlamaForQuestionAnswering, new_heads=True)


def test_a_class_of_another_config_is_refused(export):
    with pytest.raises(GateError, match="RobertaModel reads a RobertaConfig, but this pruned model has a BertConfig"):
        load_pruned(export, model_class=transformers.RobertaModel)
