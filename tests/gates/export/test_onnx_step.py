import onnxruntime
import pytest
import torch

from gates.export.onnx import export_onnx_files
from gates.surgery.remove import remove_heads_
from tests.gates.chosen import chosen
from tests.gates.export.test_onnx import build, run, texts
from tests.models import masked


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
