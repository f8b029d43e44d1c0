"""Tiny models that keep examples elsewhere than on the first axis of their heads, and models where they are on it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as t
from torch import Tensor

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 8, "patch_size": 4}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
TIME_FIRST = {
    "langs": ["en", "de"], "src_vocab_size": 50, "tgt_vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "max_position_embeddings": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
VIDEO = {
    "image_size": 16, "num_frames": 4, "tubelet_size": [1, 8, 8], "hidden_size": 32, "num_spatial_layers": 2,
    "num_temporal_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "num_auxiliary_layers": 1,
}  # fmt: skip
HASHED = {"num_hash_buckets": 32, "num_hash_functions": 4, "local_transformer_stride": 8, "downsampling_rate": 2}
IMAGE_TOKEN = 1


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(seed))


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def translation(source: int, target: int, batch: int) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, source), "decoder_input_ids": ids(batch, target, seed=1)}


def with_images(*counts: int) -> dict[str, Tensor]:
    """Texts with so many images each; an image has four tokens."""
    tokens = ids(len(counts), 4 * max(counts) + 3)
    for row, count in enumerate(counts):
        tokens[row, 1 : 1 + 4 * count] = IMAGE_TOKEN
    return {"input_ids": tokens, "pixel_values": pixels(sum(counts), 3, 8, 8)}


def llava() -> t.PreTrainedModel:
    vision, text = t.CLIPVisionConfig(num_hidden_layers=3, **IMAGE), t.LlamaConfig(**TEXT)
    return t.LlavaForConditionalGeneration(t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN))


Build, Inputs = Callable[[], t.PreTrainedModel], Callable[[], dict[str, Tensor]]
MODELS: dict[str, tuple[Build, Inputs]] = {
    "choices": (lambda: t.BertForMultipleChoice(t.BertConfig(**TEXT)), lambda: {"input_ids": ids(3, 4, 7)}),
    "square": (lambda: t.BertForSequenceClassification(t.BertConfig(**TEXT)), lambda: {"input_ids": ids(4, 4)}),
    "time first": (lambda: t.FSMTForConditionalGeneration(t.FSMTConfig(**TIME_FIRST)), lambda: translation(7, 5, batch=3)),
    "time first, square": (
        lambda: t.FSMTForConditionalGeneration(t.FSMTConfig(**TIME_FIRST)),
        lambda: translation(4, 4, batch=4),
    ),
    "Swin": (lambda: t.SwinForImageClassification(t.SwinConfig(**WINDOWS)), lambda: {"pixel_values": pixels(3, 3, 32, 32)}),
    "SwinV2": (
        lambda: t.Swinv2ForImageClassification(t.Swinv2Config(**WINDOWS)),
        lambda: {"pixel_values": pixels(4, 3, 32, 32)},
    ),
    "Donut-Swin": (lambda: t.DonutSwinModel(t.DonutSwinConfig(**WINDOWS)), lambda: {"pixel_values": pixels(3, 3, 32, 32)}),
    "VideoPrism": (
        lambda: t.VideoPrismVisionModel(t.VideoPrismVisionConfig(**VIDEO)),
        lambda: {"pixel_values_videos": pixels(3, 4, 3, 16, 16)},
    ),
    "LLaVA": (llava, lambda: with_images(1, 1, 1)),
    "CANINE": (
        lambda: t.CanineForSequenceClassification(t.CanineConfig(upsampling_kernel_size=4, **HASHED, **TEXT)),
        lambda: {"input_ids": ids(3, 16)},
    ),
}


def make(name: str) -> tuple[t.PreTrainedModel, dict[str, Tensor]]:
    """A model in evaluation mode with weights large enough that its heads matter, and a batch for it."""
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model, inputs()


def output(model: t.PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    return next(value for value in model(**batch).values() if isinstance(value, Tensor) and value.is_floating_point())


def losses_of(model: t.PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """A loss per example that depends on all that the model puts out."""
    flat = output(model, batch).double().flatten(1)
    weights = torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (flat * weights).sum(1) + flat.square().mean(1)


def one(batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: tensor[row : row + 1] for name, tensor in batch.items()}
