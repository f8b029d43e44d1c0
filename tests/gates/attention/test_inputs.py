"""Inputs are found for every architecture, run, and reach all its attention; what cannot be found is asked for."""

import copy

import pytest
import torch
import transformers as t

from gates.attention.inputs import example_inputs, resized
from gates.attention.sites import find_attention
from gates.errors import GateError
from gates.export.checkpoint import save_pruned
from tools.coverage import architectures

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TEXT, "model_type": "llama"}
PICTURE = {**SIZES, "image_size": 8, "patch_size": 4}
SPEECH = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 60, "max_source_positions": 40, "max_target_positions": 40,
    "input_feat_per_channel": 8, "conv_channels": 16,
}  # fmt: skip
SERIES = {
    "prediction_length": 4, "context_length": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
WAVE = {
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def _llava():
    return t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            text_config=LLAMA, vision_config={**PICTURE, "model_type": "clip_vision_model"}, image_token_index=50,
            vision_feature_layer=-1,
        )
    )  # fmt: skip


def _lfm3_vl():
    vision = {**SIZES, "patch_size": 4, "num_key_value_heads": 2, "layer_types": ["full_attention", "conv"]}
    text = {**TEXT, "model_type": "lfm3", "num_key_value_heads": 2, "layer_types": ["full_attention", "conv"]}
    return t.Lfm3VlForConditionalGeneration(t.Lfm3VlConfig(text_config=text, vision_config=vision, image_token_id=50))


def _mistral3():
    text = {**TEXT, "model_type": "mistral", "num_key_value_heads": 2}
    vision = {**PICTURE, "model_type": "pixtral"}
    return t.Mistral3ForConditionalGeneration(t.Mistral3Config(text_config=text, vision_config=vision, image_token_index=50))


def _idefics2():
    perceiver = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    config = t.Idefics2Config(
        text_config={**LLAMA, "model_type": "mistral", "num_key_value_heads": 2},
        vision_config=PICTURE,
        perceiver_config={**perceiver, "num_key_value_heads": 2, "hidden_size": 16},
        image_token_id=50,
    )
    return t.Idefics2ForConditionalGeneration(config)


def _wrapped(wrapper, encoder):
    decoder = t.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = getattr(t, f"{wrapper}Config").from_encoder_decoder_configs(encoder, decoder)
    return getattr(t, f"{wrapper}Model")(config)


OTHERS = {
    "several end tokens": lambda: t.LlamaForCausalLM(t.LlamaConfig(**{**TEXT, "eos_token_id": [2, 3, 4]})),
    "several end tokens, text to text": lambda: t.T5ForConditionalGeneration(
        t.T5Config(**{**architectures.T5, "eos_token_id": [2, 3]})
    ),
    "no vocabulary": lambda: t.CanineModel(t.CanineConfig(**SIZES, num_hash_buckets=50, local_transformer_stride=8)),
    "no size of pictures": lambda: t.SegformerModel(t.SegformerConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])),
    "spectrograms by time": lambda: t.Speech2TextForConditionalGeneration(t.Speech2TextConfig(**SPEECH)),
    "spectrograms as pictures": lambda: t.ASTModel(t.ASTConfig(**SIZES, max_length=32, num_mel_bins=16, patch_size=4)),
    "films": lambda: t.VivitModel(t.VivitConfig(**SIZES, image_size=8, num_frames=4, tubelet_size=[2, 4, 4])),
    "boxes": lambda: t.BrosModel(t.BrosConfig(**{**TEXT, "hidden_size": 64})),
    "a language of each text": lambda: t.XmodModel(t.XmodConfig(**TEXT, languages=["en", "de"])),
    "a picture's tokens": _llava,
    "patches in a row": _lfm3_vl,
    "pictures of any size": _mistral3,
    "several pictures": _idefics2,
    "two encoders": lambda: t.CLIPSegModel(t.CLIPSegConfig(text_config=TEXT, vision_config=PICTURE, projection_dim=16)),
    "time series": lambda: t.InformerModel(t.InformerConfig(**SERIES, lags_sequence=[1, 2], num_time_features=2)),
    "time series of channels": lambda: t.PatchTSTModel(
        t.PatchTSTConfig(num_input_channels=2, d_model=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16)
    ),
    "patches with their places": lambda: t.Pix2StructVisionModel(
        t.Pix2StructVisionConfig(
            hidden_size=16, patch_embed_hidden_size=12, d_ff=16, d_kv=8, num_hidden_layers=1, num_attention_heads=2
        )
    ),
    "regions of a picture": lambda: t.LxmertModel(
        t.LxmertConfig(
            vocab_size=60, hidden_size=16, num_attention_heads=2, intermediate_size=16, l_layers=1, x_layers=1, r_layers=1,
            visual_feat_dim=12,
        )
    ),
    "tiles of a picture": lambda: t.MllamaVisionModel(
        t.MllamaVisionConfig(
            **SIZES, num_global_layers=1, attention_heads=2, image_size=8, patch_size=4, max_num_tiles=2,
            vision_output_dim=32, intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1], [1, 2]],
        )
    ),
    "text wrapped": lambda: _wrapped("EncoderDecoder", t.BertConfig(**TEXT)),
    "pictures wrapped": lambda: _wrapped("VisionEncoderDecoder", t.ViTConfig(**PICTURE)),
    "sound wrapped": lambda: _wrapped("SpeechEncoderDecoder", t.Wav2Vec2Config(**SIZES, **WAVE)),
}  # fmt: skip


def reached(model, inputs):
    """Names of the self-attention modules whose projections a forward pass uses; its first output."""
    found, sites = set(), [site for site in find_attention(model) if site.kind != "cross"]
    hooks = [site.output.register_forward_hook(lambda *_, name=site.name: found.add(name)) for site in sites]
    with torch.no_grad():
        output = model.eval()(**inputs)[0]
    for hook in hooks:
        hook.remove()
    return found, {site.name for site in sites}, output


@pytest.mark.integration
@pytest.mark.parametrize("name", architectures.BY_NAME)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_every_architecture_of_the_coverage(name, padded):
    model = architectures.build(architectures.BY_NAME[name])
    found, expected, output = reached(model, example_inputs(model, padded=padded))
    assert found == expected
    assert output.isfinite().all()


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_config_tells_less(name):
    torch.manual_seed(0)
    model = OTHERS[name]().eval()
    found, expected, output = reached(model, example_inputs(model, batch=3))
    assert found == expected
    assert output.isfinite().all()


def test_a_text_has_the_tokens_of_its_pictures_and_no_other_special_token():
    model = _llava().eval()
    ids = example_inputs(model, batch=3, length=10)["input_ids"]
    assert ids.shape == (3, 4 + 10)  # (8 / 4) ** 2 patches
    assert (ids[:, :4] == 50).all()
    assert not set(ids[:, 4:].flatten().tolist()) & {0, 1, 2, 50}


def test_several_end_tokens_are_all_special_and_the_first_ends_a_text():
    model = OTHERS["several end tokens, text to text"]()
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
    audio = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8}
    text = {**TEXT, "model_type": "qwen2", "num_key_value_heads": 2}
    config = t.Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=50)
    model = t.Qwen2AudioForConditionalGeneration(config).eval()
    with torch.no_grad():
        model(input_ids=torch.tensor([[5, 6]]))
    with pytest.raises(
        GateError, match=r"attention at 'model.audio_tower.layers.0.self_attn' took no part.*give some as check_"
    ):
        example_inputs(model)


def test_unknown_inputs_are_asked_for_before_anything_is_written(tmp_path):
    sizes = {"hidden_size": 16, "n_layer": 2, "n_head": 2, "state_dim": 3, "act_dim": 2, "max_ep_len": 20}
    model = t.DecisionTransformerModel(t.DecisionTransformerConfig(**sizes)).eval()
    heads = sum(site.heads for site in find_attention(model))
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(
        GateError, match=r"DecisionTransformerModel runs on \('states' is of no known kind\); give some as check_"
    ):
        save_pruned(model, tmp_path / "out", torch.ones(heads), tokenizer=None)
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["several end tokens", "no vocabulary", "films", "a language of each text"])
def test_such_models_are_saved_without_a_check_batch(name, tmp_path):
    torch.manual_seed(0)
    model = OTHERS[name]().eval()
    mask = torch.ones(sum(site.heads for site in find_attention(model)))
    mask[0] = 0
    assert (save_pruned(model, tmp_path / "out", mask, tokenizer=None, form="masked") / "README.md").is_file()


def test_inputs_whose_rows_are_not_examples_are_not_resized():
    inputs = example_inputs(_lfm3_vl().eval())
    with pytest.raises(GateError, match="cannot be resized"):
        resized(inputs, 4)


@pytest.mark.parametrize("made", [t.Blip2QFormerModel, t.InstructBlipQFormerModel])
def test_a_q_former_has_queries_and_what_they_look_at(made):
    model = made(made.config_class(**TEXT, encoder_hidden_size=24, cross_attention_frequency=1))
    inputs = example_inputs(model, batch=3)
    assert inputs["query_embeds"].shape == (3, 16, 16)
    assert inputs["encoder_hidden_states"].shape == (3, 16, 24)
