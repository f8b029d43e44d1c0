import sys

import onnxruntime
import pytest
import torch
import transformers

from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.onnx import export_onnx, export_onnx_files
from gates.surgery.remove import remove_heads_
from tests.gates.chosen import chosen
from tests.models import masked
from tools.coverage import architectures as zoo

CONFIGS = {
    "Bert": zoo.BERT, "Llama": zoo.GROUPED, "GPT2": {**zoo.GPT, "pad_token_id": 0, "eos_token_id": 2}, "Bart": zoo.BART,
    "T5": zoo.T5, "ViT": zoo.VIT,
}  # fmt: skip
CLOSE = {"atol": 2e-5, "rtol": 1e-4}
ONE_LAYER = {**zoo.BERT, "num_hidden_layers": 1}
"""For what does not depend on the number of layers; the exporter takes seconds for each."""


def build(class_name):
    """A tiny random model and a mask that leaves a layer without heads and, under grouped queries, uneven groups."""
    family = next(name for name in CONFIGS if class_name.startswith(name))
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    model = zoo.randomise_(getattr(transformers, class_name)(config)).eval()
    mask = torch.ones(sum(site.heads for site in find_attention(model)))
    mask[:4], mask[5] = 0.0, 0.0
    return model, mask


def texts(batch, length, *, seed, padded=True):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded and batch > 1:
        mask[1, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(session, inputs):
    names = [value.name for value in session.get_outputs()]
    found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip(names, map(torch.from_numpy, found), strict=True))


def check(model, mask, path, batches, prepare):
    session = onnxruntime.InferenceSession(path)
    for batch in batches:
        expected = masked(model, mask, lambda batch=batch: prepare(model)(**batch))
        found = run(session, batch)
        assert found.keys() == {name for name, value in expected.items() if torch.is_tensor(value)}
        for name, output in found.items():
            torch.testing.assert_close(output, expected[name], **CLOSE)


@pytest.mark.parametrize(
    "class_name",
    chosen(
        [
            *("BertForSequenceClassification", "BertForQuestionAnswering", "LlamaForSequenceClassification"),
            *("GPT2ForSequenceClassification", "T5EncoderModel"),
        ],
        fast=(),
        integration=["BertForSequenceClassification", "LlamaForSequenceClassification"],
    ),
)
def test_a_pruned_model_in_onnx_runtime_equals_the_masked_model(tmp_path, class_name):
    model, mask = build(class_name)
    dense, _ = build(class_name)
    path = export_onnx(remove_heads_(model, mask), tmp_path / "model.onnx", texts(2, 7, seed=1))
    batches = [texts(batch, length, seed=2) for batch, length in ((2, 7), (1, 4), (5, 12), (3, 3))]
    check(dense, mask, path, batches, lambda model: model)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.integration
def test_the_encoder_of_an_encoder_decoder(tmp_path):
    model, mask = build("BartForConditionalGeneration")
    dense, _ = build("BartForConditionalGeneration")
    encoder = remove_heads_(model, mask).get_encoder()
    path = export_onnx(encoder, tmp_path / "encoder.onnx", texts(2, 7, seed=1))
    batches = [texts(batch, length, seed=2) for batch, length in ((2, 7), (1, 4), (5, 12))]
    check(dense, mask, path, batches, lambda model: model.get_encoder())


@pytest.mark.integration
def test_weights_of_another_dtype_are_written_as_float32_and_the_model_stays_as_it_was(tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**ONE_LAYER))
    remove_heads_(zoo.randomise_(model), torch.tensor([0.0, 1, 1, 0])).to(torch.bfloat16).train()
    path = export_onnx(model, tmp_path / "model.onnx", texts(2, 7, seed=1))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.training
    batch = texts(3, 5, seed=2)
    with torch.no_grad():
        expected = model.float().eval()(**batch).logits
    torch.testing.assert_close(run(onnxruntime.InferenceSession(path), batch)["logits"], expected, **CLOSE)


@pytest.mark.integration
def test_pictures_have_a_dynamic_batch_and_large_weights_lie_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr("gates.export.onnx.LARGEST_FILE", 0)
    model, mask = build("ViTForImageClassification")
    dense, _ = build("ViTForImageClassification")
    path = export_onnx(remove_heads_(model, mask), tmp_path / "model.onnx", {"pixel_values": torch.randn(2, 3, 8, 8)})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    check(dense, mask, path, [{"pixel_values": torch.randn(batch, 3, 8, 8)} for batch in (1, 4)], lambda model: model)


class Branching(transformers.BertForSequenceClassification):
    """Goes another way for some values, which the exporter cannot follow."""

    def forward(self, **inputs):
        output = super().forward(**inputs)
        if output.logits.sum() > 0:
            output.logits = -output.logits
        return output


@pytest.mark.integration
def test_what_the_exporter_does_not_take_is_refused_in_one_sentence(tmp_path):
    model = Branching(transformers.BertConfig(**ONE_LAYER)).eval()
    with pytest.raises(GateError, match=r"torch.onnx.export fails on Branching: \w+") as caught:
        export_onnx(model, tmp_path / "model.onnx", texts(2, 7, seed=1))
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_packages_are_named_with_what_to_install(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    model, _ = build("BertModel")
    with pytest.raises(GateError, match=f"'{package}'; run pip install onnx onnxscript onnxruntime"):
        export_onnx(model, tmp_path / "model.onnx", texts(2, 7, seed=1))
    assert list(tmp_path.iterdir()) == []


# One step of a decoder with its cache.


def empty_cache(session, batch):
    """One tensor without tokens for every key and value that the graph takes."""
    values = (value for value in session.get_inputs() if value.name.startswith("past_key_values"))
    return {value.name: torch.zeros(batch, value.shape[1], 0, value.shape[3]) for value in values}


def kept(found):
    return {name.replace("present", "past_key_values"): tensor for name, tensor in found.items() if "present" in name}


def greedy(step, first, cache, tokens):
    """Greedy decoding: ``step`` maps new tokens, those before them and a cache to the graph's outputs."""
    ids, new = first, first
    for _ in range(tokens):
        found = step(new, ids, cache)
        new, cache = found["logits"][:, -1].argmax(-1, keepdim=True), kept(found)
        ids = torch.cat([ids, new], dim=1)
    return ids


@pytest.mark.parametrize(
    "class_name", chosen(["LlamaForCausalLM", "GPT2LMHeadModel"], fast=(), integration=["LlamaForCausalLM"])
)
def test_a_decoder_generates_step_by_step_with_its_cache(tmp_path, class_name):
    model, mask = build(class_name)
    dense, _ = build(class_name)
    (path,) = export_onnx_files(remove_heads_(model, mask), tmp_path, texts(2, 8, seed=1))
    session = onnxruntime.InferenceSession(path)
    prompt = texts(3, 5, seed=4, padded=False)

    def step(new, ids, cache):
        positions = torch.arange(ids.shape[1] - new.shape[1], ids.shape[1]).expand(len(ids), -1)
        return run(session, {"input_ids": new, "attention_mask": torch.ones_like(ids), "position_ids": positions, **cache})

    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = masked(dense, mask, lambda: dense.generate(**prompt, **options))
    assert torch.equal(greedy(step, prompt["input_ids"], empty_cache(session, 3), 6), expected)
    if class_name == "LlamaForCausalLM":
        widths = {value.name: value.shape[1::2] for value in session.get_inputs() if value.name.endswith("key")}
        assert widths == {"past_key_values.0.key": [1, 1], "past_key_values.1.key": [3, 8]}


@pytest.mark.nightly
def test_an_encoder_decoder_generates_step_by_step_with_its_cache(tmp_path):
    """T5, whose later layers take the position bias of a first one that has no heads left."""
    model, mask = build("T5ForConditionalGeneration")
    dense, _ = build("T5ForConditionalGeneration")
    inputs = texts(2, 8, seed=1)
    decoder_ids = texts(2, 6, seed=5)["input_ids"]
    encoder, decoder = export_onnx_files(remove_heads_(model, mask), tmp_path, inputs | {"decoder_input_ids": decoder_ids})
    assert (encoder.name, decoder.name) == ("encoder_model.onnx", "decoder_model.onnx")
    prompt = texts(3, 5, seed=4)
    hidden = run(onnxruntime.InferenceSession(encoder), prompt)["last_hidden_state"]
    session = onnxruntime.InferenceSession(decoder)
    given = {"encoder_hidden_states": hidden, "encoder_attention_mask": prompt["attention_mask"]}
    found = greedy(
        lambda new, _, cache: run(session, {"input_ids": new, **given, **cache}),
        torch.full((3, 1), dense.config.decoder_start_token_id),
        empty_cache(session, 3),
        6,
    )
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(found, masked(dense, mask, lambda: dense.generate(**prompt, **options)))
