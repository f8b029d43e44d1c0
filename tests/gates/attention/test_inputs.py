"""Inputs are found for every architecture, run, and reach all its attention; what cannot be found is asked for."""

import copy

import pytest
import torch
import transformers as t
from packaging.version import Version

from gates.attention.inputs import example_inputs, resized
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import save_pruned
from tests.gates import chosen
from tools.coverage import architectures
from tools.coverage.tiny import tiny_config

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 60,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny(model_class):
    """A model of the defaults of its configuration, with small sizes."""
    torch.manual_seed(0)
    return model_class(tiny_config(model_class.config_class())).eval()


def wrapped(wrapper, encoder):
    decoder = t.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = getattr(t, f"{wrapper}Config").from_encoder_decoder_configs(tiny_config(encoder), decoder)
    return getattr(t, f"{wrapper}Model")(config).eval()


def several_end_tokens():
    return t.T5ForConditionalGeneration(t.T5Config(**{**architectures.T5, "eos_token_id": [2, 3]})).eval()


OTHERS = {
    "several end tokens": lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**TEXT, "eos_token_id": [2, 3, 4]})).eval(),
    "several end tokens, text to text": several_end_tokens,
    "text wrapped": lambda: wrapped("EncoderDecoder", t.BertConfig()),
    "pictures wrapped": lambda: wrapped("VisionEncoderDecoder", t.ViTConfig()),
    "sound wrapped": lambda: wrapped("SpeechEncoderDecoder", t.Wav2Vec2Config()),
    "no vocabulary": "CanineModel",
    "no size of pictures": "SegformerModel",
    "spectrograms by time": "Speech2TextForConditionalGeneration",
    "spectrograms as pictures": "ASTModel",
    "films": "VivitModel",
    "boxes": "BrosModel",
    "a language of each text": "XmodModel",
    "a picture's tokens": "LlavaForConditionalGeneration",
    "patches in a row": "Lfm3VlForConditionalGeneration",
    "pictures of any size": "Mistral3ForConditionalGeneration",
    "several pictures": "Idefics2ForConditionalGeneration",
    "two encoders": "CLIPSegModel",
    "time series": "InformerModel",
    "time series of channels": "PatchTSTModel",
    "patches with their places": "Pix2StructVisionModel",
    "regions of a picture": "LxmertModel",
    "tiles of a picture": "MllamaVisionModel",
}


def other(name):
    made = OTHERS[name]
    return tiny(getattr(t, made)) if isinstance(made, str) else made()


def reached(model, inputs):
    """Names of the self-attention modules whose projections a forward pass uses; its first output."""
    found, sites = set(), [site for site in find_attention(model) if site.kind != "cross"]
    hooks = [site.output.register_forward_hook(lambda *_, name=site.name: found.add(name)) for site in sites]
    with torch.no_grad():
        output = model.eval()(**inputs)[0]
    for hook in hooks:
        hook.remove()
    return found, {site.name for site in sites}, output


@pytest.mark.parametrize("name", chosen.architectures())
def test_every_architecture_of_the_coverage(name):
    model = architectures.build(architectures.BY_NAME[name])
    found, expected, output = reached(model, example_inputs(model, padded=True))
    assert found == expected
    assert output.isfinite().all()


def skip_on_older(version, why):
    if Version(t.__version__) < Version(version):
        pytest.skip(f"Transformers {t.__version__} {why}")


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_config_tells_less(name):
    if name == "tiles of a picture":
        skip_on_older("5.16", "asks for the aspect ratios of tiles, which are asked of the user")
    model = other(name)
    found, expected, output = reached(model, example_inputs(model, batch=3))
    assert found == expected
    assert output.isfinite().all()


def test_a_text_has_the_tokens_of_its_pictures_and_no_other_special_token():
    model = tiny(t.LlavaForConditionalGeneration)
    ids, picture = example_inputs(model, batch=3, length=10)["input_ids"], model.config.image_token_index
    patches = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
    assert ids.shape == (3, patches + 10)
    assert (ids[:, :patches] == picture).all()
    text = model.config.text_config
    assert not set(ids[:, patches:].flatten().tolist()) & {text.bos_token_id, text.eos_token_id, picture}


def test_several_end_tokens_are_all_special_and_the_first_ends_a_text():
    model = several_end_tokens()
    ids = example_inputs(model, batch=64)["input_ids"]
    assert (ids[:, -1] == 2).all()
    assert not set(ids[:, :-1].flatten().tolist()) & {0, 1, 2, 3}


def test_the_same_seed_gives_the_same_inputs_and_nothing_else_changes():
    model = architectures.build(architectures.BY_NAME["Bert"]).train()
    model.bert.pooler = None
    model.bert.encoder.layer[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other = example_inputs(model, seed=3), example_inputs(model, seed=3)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), before)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not torch.equal(one["input_ids"], example_inputs(model, seed=4)["input_ids"])


def test_inputs_that_leave_attention_out_are_not_taken():
    """A text alone runs through a model that also hears, and says nothing of its other encoder."""
    model = tiny(t.Qwen2AudioForConditionalGeneration)
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    with pytest.raises(
        GateError, match=r"attention at 'model.audio_tower.layers.0.self_attn' took no part.*give inputs as check_"
    ):
        example_inputs(model)


def test_unknown_inputs_are_asked_for_before_anything_is_written(tmp_path):
    model = tiny(t.DecisionTransformerModel)
    heads = sum(site.heads for site in find_attention(model))
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(
        GateError, match=r"DecisionTransformerModel runs \('states' is of no known kind\); give inputs as check_"
    ):
        save_pruned(model, tmp_path / "out", torch.ones(heads), tokenizer=None)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_inputs_whose_rows_are_not_examples_are_not_resized():
    inputs = example_inputs(tiny(t.Lfm3VlForConditionalGeneration))
    with pytest.raises(GateError, match="cannot be resized"):
        resized(inputs, 4)


@pytest.mark.parametrize("made", [t.Blip2QFormerModel, t.InstructBlipQFormerModel])
def test_a_q_former_has_queries_and_what_they_look_at(made):
    if made is t.InstructBlipQFormerModel:
        skip_on_older("5.16", "builds no such model from the whole configuration")
    model = tiny(made)
    inputs, config = example_inputs(model, batch=3), model.config
    assert inputs["query_embeds"].shape == (3, 16, config.hidden_size)
    assert inputs["encoder_hidden_states"].shape == (3, 16, config.encoder_hidden_size)
