"""The README of an export: its snippet runs as it stands, its metadata are the Hub's, its numbers those that were given."""

import json
import math
import re
from pathlib import Path

import huggingface_hub
import pytest
import tokenizers
import torch
import transformers as t

from gates.attention.sites import find_attention
from gates.export.card import ModelCard, evaluation_block, torch_usage
from gates.export.checkpoint import own_auto_class, save_pruned
from gates.model import get_gated_model
from tests.gates.chosen import chosen
from tests.models import SEQ2SEQ, VOCABULARY, _sizes, build, random_mask, run_fresh
from tools.coverage.every_type import check_code
from tools.coverage.tiny import tiny_models

ROOT = str(Path(__file__).parents[3])
PROCESS = """
import contextlib, io, json, pathlib, sys
said = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.py")):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(path.read_text(), str(path), "exec"), {})
    said[path.stem] = out.getvalue()
pathlib.Path(sys.argv[1], "said.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def tokenizer():
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *(f"word{i}" for i in range(VOCABULARY - 4))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    return t.PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **special)


def model_of(head):
    torch.manual_seed(0)
    if head == "Bart":
        return t.BartForConditionalGeneration(t.BartConfig(**SEQ2SEQ)).eval()
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    return getattr(t, f"Bert{head}")(t.BertConfig(**_sizes(**names))).eval()


def mllama():
    return next(model for model in tiny_models("mllama_text_model") if type(model).__name__ == "MllamaForCausalLM")


def snippet(directory):
    text = (directory / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert code.count("path/to/this/directory") == 1
    return code.replace("path/to/this/directory", str(directory))


def run(folder, directories):
    """What the snippet of each export prints, in a process of its own."""
    for name, directory in directories.items():
        (folder / f"{name}.py").write_text(snippet(directory).replace("path/to/base/model", str(folder / "base")))
    run_fresh(PROCESS, folder, folder=folder, PYTHONPATH=ROOT)
    return json.loads((folder / "said.json").read_text())


@pytest.mark.integration
def test_the_snippet_of_every_form_and_task_runs_to_a_prediction(tmp_path, tokenizer):
    exports, folder = {}, tmp_path / "snippets"
    folder.mkdir()
    heads = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM", "Model", "Bart")
    for head in heads:
        model = model_of(head)
        mask = torch.ones(sum(site.heads for site in find_attention(model)))
        mask[1] = 0
        exports[head] = save_pruned(model, tmp_path / head, mask, tokenizer=tokenizer)
    for name, form in (("gpt2", "pruned"), ("llama", "masked"), ("marian", "pruned"), ("vit", "pruned"), ("bert", "masked")):
        exports[f"{name}-{form}"] = save_pruned(build(name), tmp_path / name, random_mask(name), form=form, tokenizer=None)
    for form in ("pruned", "masked"):
        mask = torch.ones(sum(site.heads for site in find_attention(mllama())))
        mask[1] = 0
        exports[f"mllama-{form}"] = save_pruned(mllama(), tmp_path / f"mllama-{form}", mask, form=form, tokenizer=None)
    stock = torch.tensor([1.0, 1, 0, 0, 1, 1, 0, 0])
    exports["stock"] = save_pruned(build("llama"), tmp_path / "stock", stock, form="stock", tokenizer=tokenizer)
    gated = get_gated_model(model_of("ForSequenceClassification")).set_mask_(random_mask("bert"))
    gated.save_pretrained(tmp_path / "gates")
    gated.base_model.save_pretrained(folder / "base")
    exports["gates-alone"] = tmp_path / "gates"
    said = run(folder, exports)
    assert said.keys() == exports.keys()
    assert said["ForSequenceClassification"].strip() in ("bad", "good")
    assert said["gates-alone"].strip() in ("bad", "good")
    assert set(re.findall(r"\w+", said["ForTokenClassification"])) <= {"bad", "good"}
    assert said["Model"].startswith("torch.Size([1, ")
    assert said["gpt2-pruned"].startswith("[")
    assert said["vit-pruned"].startswith("LABEL_")
    assert said["mllama-pruned"].startswith("[")
    assert said["mllama-masked"].startswith("[")
    inputs = tokenizer("The attention heads that are left do the work.", return_tensors="pt")
    generated = t.AutoModelForCausalLM.from_pretrained(tmp_path / "stock").generate(**inputs, max_new_tokens=20)
    assert said["stock"] == tokenizer.decode(generated[0], skip_special_tokens=True) + "\n"


FAMILIES = (
    *("bert", "gpt2", "t5", "vit", "wav2vec2", "whisper", "beit", "bros", "udop", "pop2piano", "flava_image_codebook"),
    *("qwen3_vl", "idefics3", "video_llama_3"),
)
MORE = (
    *("audioflamingo3", "bart", "blip-2", "dab-detr", "diffusion_gemma", "dinov2", "encoder-decoder", "glm4v", "hiera"),
    *("informer", "instructblip", "kosmos-2", "lfm2_vl", "llama", "llava_next", "longt5", "mllama", "oneformer"),
    *("parakeet_tdt", "qwen2_5_vl", "siglip2", "speech_to_text", "swin", "time_series_transformer", "xmod"),
)
"""Families whose code depends on what the model reads, generates or returns."""


@pytest.mark.parametrize("name", chosen([*FAMILIES, *MORE], fast=(), integration=FAMILIES))
def test_the_code_runs_for_every_class_of_a_family(name):
    for model in tiny_models(name):
        check_code(model)


def test_a_model_that_takes_many_passes_for_two_tokens_is_not_run_to_the_end(monkeypatch):
    """Such as a diffusion model, which denoises a whole block for the first token."""
    model, passes = build("gpt2"), []

    def generate(input_ids, **_):
        for _ in range(100):
            passes.append(model(input_ids))

    monkeypatch.setattr(model, "generate", generate)
    code = "\n".join(torch_usage(model, "AutoModelForCausalLM", remote_code=True, has_tokenizer=False))
    assert len(passes) < 10
    assert "generate" not in code
    assert "outputs = model(**inputs)" in code
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_class_that_no_auto_class_loads_is_loaded_by_itself():
    """The test of every form and task runs this code."""
    model = mllama()
    for remote_code, loader in ((False, "MllamaForCausalLM"), (True, "AutoModel")):
        lines = torch_usage(model, own_auto_class(model), remote_code=remote_code, has_tokenizer=False)
        assert f"from transformers import {loader}" in lines


# -- what is stated ----------------------------------------------------------------------------------------------


def readme(directory, **card):
    save_pruned(build("bert"), directory, random_mask("bert"), card=ModelCard(**card), tokenizer=None)
    return huggingface_hub.ModelCard.load(directory / "README.md")


def test_the_metadata_are_the_hubs(tmp_path):
    card = readme(
        tmp_path / "out",
        base_model="someone/model",
        metrics={"accuracy": 0.875, "loss": 0.25, "examples": 8},
        dense_metrics={"accuracy": 0.90, "loss": 0.2},
        dataset="glue",
        subset="sst2",
    )
    data = card.data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("someone/model", "transformers", "text-classification")
    assert [(result.metric_type, result.metric_value) for result in data.eval_results] == [
        ("accuracy", 0.875), ("loss", 0.25), ("examples", 8),
    ]  # fmt: skip
    result = data.eval_results[0]
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("glue", "sst2", "test")
    assert "- Base model: `someone/model`" in card.text
    assert "| metric | dense | pruned |" in card.text
    assert "| accuracy | 0.9 | 0.875 |" in card.text
    assert "| examples |  | 8 |" in card.text


def test_the_base_model_and_its_licence_are_found_where_it_was_loaded_from(tmp_path):
    build("bert").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\nwords")
    model = t.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    save_pruned(model, tmp_path / "out", random_mask("bert"), tokenizer=None)
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit"
    assert card.data.base_model is None  # a folder is no name on the Hub
    assert "- Base model: `base`\n" in card.text


def test_hostile_text_stays_text(tmp_path):
    name = 'x`\n---\n```python\nimport os; os.system("echo")\n```\n'
    directory = tmp_path / "out"
    readme(directory, base_model=name, method=name, metrics={"accuracy": 0.5}, dataset=name)
    text = (directory / "README.md").read_text()
    assert text.count("\n---\n") == 1
    assert re.findall(r"^```", text, flags=re.MULTILINE) == ["```", "```"]
    data = huggingface_hub.ModelCard.load(directory / "README.md").data
    assert data.eval_results[0].dataset_type == name


# Results in the Hub's evaluation block.


DATA = {"dataset": "nyu-mll/glue", "subset": "cola", "split": "validation"}
TYPES = {"f1": {"type": "f1", "args": {"average": "macro"}}, "matthews": {"type": "matthews_correlation"}}


def block(numbers, types, **data):
    return evaluation_block(ModelCard(metrics=numbers, metric_types=types, **data), "text-classification")


def test_the_block_goes_into_a_card_and_comes_out_of_it():
    results = block({"f1": 0.5, "matthews": 0.25}, TYPES, **DATA)
    data = huggingface_hub.ModelCardData(model_name="small", eval_results=results)
    read = huggingface_hub.ModelCard(f"---\n{data.to_yaml()}\n---\n").data.eval_results
    assert [(one.metric_name, one.metric_type, one.metric_args) for one in read] == [
        ("f1", "f1", {"average": "macro"}),
        ("matthews", "matthews_correlation", None),
    ]
    assert {one.dataset_config for one in read} == {"cola"}


def test_what_is_no_number_and_results_on_unknown_data_are_left_out():
    assert block({"accuracy": math.nan, "bleu": "none"}, {}, **DATA) == []
    assert block({"accuracy": 0.5}, {}, **(DATA | {"dataset": ""})) == []


def test_results_on_further_splits_are_metrics_of_their_own_split():
    numbers = {"word_perplexity": 9.0, "news_f1": 0.25, "news_word_perplexity": 8.0, "loss": 1.0}
    results = block(numbers, TYPES, **DATA, more_splits=["news"])
    assert [(one.dataset_split, one.metric_name, one.metric_type, one.metric_value) for one in results] == [
        ("validation", "word_perplexity", "word_perplexity", 9.0),
        ("news", "f1", "f1", 0.25),
        ("news", "word_perplexity", "word_perplexity", 8.0),
        ("validation", "loss", "loss", 1.0),
    ]
