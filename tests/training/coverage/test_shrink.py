"""Tiny configurations by rules."""

import pytest
import transformers as t
from transformers import PreTrainedConfig

from training.coverage.shrink import HEAD_SIZE, HEADS, VOCABULARY, WIDTH, tiny_config


@pytest.mark.parametrize("name", ["Bert", "Llama", "T5", "ViT", "CLIP", "Whisper", "Swin", "Qwen2VL", "Gemma3", "DeepseekV3"])
def test_a_tiny_config_is_small_everywhere_and_a_fixed_point_of_its_class(name):
    config = tiny_config(getattr(t, f"{name}Config")())
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
    for part in parts:
        for field in ("hidden_size", "d_model", "embed_dim"):
            assert getattr(part, field, 0) <= 8 * WIDTH
        assert getattr(part, "vocab_size", 0) <= VOCABULARY
        assert getattr(part, "num_hidden_layers", 0) <= 6
    assert type(config)(**config.to_dict()).to_dict() == config.to_dict()


def test_heads_and_widths_fit():
    config = tiny_config(t.LlamaConfig(num_key_value_heads=8))
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (WIDTH, HEADS, HEADS // 2)
    assert config.head_dim == HEAD_SIZE


def test_one_layer_of_each_sort_stays():
    config = tiny_config(t.Qwen3NextConfig())
    assert config.layer_types == ["linear_attention", "full_attention"]
    assert config.num_hidden_layers == 2


def test_special_tokens_are_the_same_everywhere_and_in_the_vocabulary():
    config = tiny_config(t.Qwen2VLConfig())
    tokens = {name: value for name, value in vars(config).items() if name.endswith("token_id") and isinstance(value, int)}
    assert max(tokens.values()) < VOCABULARY
    assert len({tokens["image_token_id"], tokens["video_token_id"]}) == 2


def test_rotary_sections_fill_half_a_head():
    config = tiny_config(t.Qwen2VLConfig())
    assert sum(config.text_config.rope_parameters["mrope_section"]) == HEAD_SIZE // 2


def test_layers_counted_from_the_last_one_are_there():
    config = tiny_config(t.VipLlavaConfig())
    assert all(abs(layer) <= config.vision_config.num_hidden_layers for layer in config.vision_feature_layers)
