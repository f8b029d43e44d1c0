"""Random inputs of the kind a model takes, for checks and measurements that need some input but no particular one."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gates.errors import GateError

SHIFTING = ("ForSequenceClassification", "ForQuestionAnswering")
"""Encoder-decoders that make the decoder's input from the encoder's, and need both to be of one length."""


def example_inputs(
    model: PreTrainedModel, *, batch: int = 2, length: int = 16, padded: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs for one forward pass: text, pictures or sound, as ``model.main_input_name`` says.

    Args:
        model: any Transformers model; an encoder-decoder also gets ``decoder_input_ids`` unless it makes them itself.
        batch: examples.
        length: tokens per example; less where the model has fewer positions. Pictures and sound have the model's size.
        padded: whether every second example is a quarter shorter, padded on the right.
        seed: the same seed gives the same inputs.

    Raises:
        GateError: for a model whose main input is none of these.
    """
    generator = torch.Generator().manual_seed(seed)
    config, main = model.config, model.main_input_name
    takes_decoder_ids = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if main == "input_ids":
        inputs = _text(config.get_text_config(), batch, length, padded, generator)
        if takes_decoder_ids and not type(model).__name__.endswith(SHIFTING):
            inputs["decoder_input_ids"] = _ids(config, batch, inputs["input_ids"].shape[1], generator)
        if hasattr(config, "vision_config") and hasattr(config, "text_config"):
            inputs["pixel_values"] = _pictures(config.vision_config, batch, generator)
    elif main == "pixel_values":
        inputs = {"pixel_values": _pictures(config, batch, generator)}
    elif main == "input_features":  # the mel spectrogram of Whisper: two frames per encoder position
        frames = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(batch, config.num_mel_bins, frames, generator=generator)}
        if takes_decoder_ids:
            inputs["decoder_input_ids"] = _ids(config, batch, length, generator)
    elif main == "input_values":  # a wave of 16,000 samples per second
        inputs = {"input_values": torch.randn(batch, 8000, generator=generator)}
    else:
        raise GateError(f"{type(model).__name__} takes {main!r}, for which no example inputs are known; give some")
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def resized(inputs: dict[str, Tensor], batch: int, length: int | None = None) -> dict[str, Tensor]:
    """The same inputs with another number of examples and, for tensors ``[batch, length]``, another length.

    Rows and columns are repeated in turn or left out; no attention mask is left without a single visible token.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        tensor = tensor[torch.arange(batch, device=tensor.device) % len(tensor)]
        if length is not None and tensor.dim() == 2:
            tensor = tensor[:, torch.arange(length, device=tensor.device) % tensor.shape[1]]
            if name.endswith("attention_mask"):
                tensor = tensor.where(tensor.any(dim=1, keepdim=True), torch.ones_like(tensor))
        found[name] = tensor
    return found


def _text(config: object, batch: int, length: int, padded: bool, generator: torch.Generator) -> dict[str, Tensor]:
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 2:
        length = min(length, positions - 2)  # RoBERTa's first position is 2
    ids = _ids(config, batch, length, generator)
    mask = torch.ones_like(ids)
    if padded:
        pad = getattr(config, "pad_token_id", None)
        short = length - length // 4
        mask[1::2, short:] = 0
        ids[1::2, short - 1] = ids[1::2, -1]  # the end token
        ids[1::2, short:] = pad if isinstance(pad, int) else 0
    return {"input_ids": ids, "attention_mask": mask}


def _ids(config: object, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random tokens that are not special, with the end token at the end where classifiers look for it (BART)."""
    special = {getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "decoder_start", "image")}
    usual = torch.tensor([token for token in range(config.vocab_size) if token not in special])  # type: ignore[attr-defined]
    ids = usual[torch.randint(len(usual), (batch, length), generator=generator)]
    end = getattr(config, "eos_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and isinstance(end, int):
        ids[:, -1] = end
    return ids


def _pictures(config: object, batch: int, generator: torch.Generator) -> Tensor:
    size = config.image_size  # type: ignore[attr-defined]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, getattr(config, "num_channels", 3), height, width, generator=generator)
