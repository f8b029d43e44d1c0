"""Every attention site has a name of its own, which says where it is."""

import pytest
import transformers as t

from gates.attention.sites import find_attention, site_labels

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PICTURE = {**SIZES, "image_size": 8, "patch_size": 4}
TOWERS = ["text_model.encoder.0", "text_model.encoder.1", "vision_model.encoder.0", "vision_model.encoder.1"]


def _towers(name, **more):
    config = getattr(t, f"{name}Config")(text_config=TEXT, vision_config=PICTURE, projection_dim=16, **more)
    return getattr(t, f"{name}Model")(config)


def _idefics2():
    perceiver = {"resampler_n_latents": 3, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    text = {**TEXT, "model_type": "mistral", "num_key_value_heads": 2}
    perceiver |= {"num_key_value_heads": 2, "hidden_size": 16}
    return t.Idefics2Model(t.Idefics2Config(text_config=text, vision_config=PICTURE, perceiver_config=perceiver))


def _speech_wrapped():
    """Whose encoder has more layers than its decoder, both of one kind of layer."""
    decoder = t.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    encoder = t.BertConfig(**{**TEXT, "num_hidden_layers": 3})
    return t.EncoderDecoderModel(t.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


ALBERT = {**TEXT, "embedding_size": 8, "num_hidden_groups": 2, "inner_group_num": 2}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: _towers("CLIPSeg"), ["decoder.0", "decoder.1", "encoder.0", "encoder.1"]),  # its text model is causal
        (lambda: _towers("AltCLIP"), TOWERS),
        (_idefics2, ["vision_model.encoder.0", "vision_model.encoder.1", "connector.encoder.0", "decoder.0", "decoder.1"]),
        (_speech_wrapped, ["encoder.0", "encoder.1", "encoder.2", "decoder.0", "cross.0", "decoder.1", "cross.1"]),
        (lambda: t.AlbertModel(t.AlbertConfig(**ALBERT)), ["encoder.0.0", "encoder.0.1", "encoder.1.0", "encoder.1.1"]),
        (
            lambda: t.CanineModel(t.CanineConfig(**SIZES)),
            ["initial_char_encoder.encoder.0", "encoder.encoder.0", "encoder.encoder.1", "final_char_encoder.encoder.0"],
        ),
    ],
    ids=["CLIPSeg", "AltCLIP", "Idefics2", "wrapped", "ALBERT", "CANINE"],
)
def test_stacks_of_one_kind_are_told_apart(build, expected):
    assert list(site_labels(find_attention(build()))) == expected
