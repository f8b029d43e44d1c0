"""The models that are measured: random ones of a shape, or one in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from gates.errors import GateError, first_line


@dataclass(frozen=True)
class Shape:
    """A Transformer that is built with random weights. A feed-forward block is four times as wide as the model."""

    layers: int
    heads: int
    width: int
    vocabulary: int = 30522


SHAPES = {"tiny": Shape(2, 4, 64, 1000), "small": Shape(6, 12, 384), "base": Shape(12, 12, 768)}
"""``small`` is the shape of MiniLM-L6, ``base`` that of BERT-base."""
POSITIONS = 512
DROPOUT = 0.1
LABELS = 2
HEADS_OF_A_GROUP = 4
DECODER_VOCABULARY = 4096
"""Of the decoder at most, so that its output layer is not most of the work."""


def random_classifier(shape: Shape) -> PreTrainedModel:
    """A classifier as BERT is, with random weights; the same each time."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, intermediate_size=4 * shape.width, max_position_embeddings=POSITIONS,
            hidden_dropout_prob=DROPOUT, attention_probs_dropout_prob=DROPOUT,
        )
    )  # fmt: skip


def random_decoder(shape: Shape) -> PreTrainedModel:
    """A language model as Llama is, with :data:`HEADS_OF_A_GROUP` heads to a key and a value; the same each time.

    Its gated feed-forward block has three matrices in the place of two and is narrower by as much.
    """
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=min(shape.vocabulary, DECODER_VOCABULARY), hidden_size=shape.width, num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads, num_key_value_heads=max(1, shape.heads // HEADS_OF_A_GROUP),
            intermediate_size=8 * shape.width // 3, max_position_embeddings=POSITIONS,
        )
    )  # fmt: skip


def random_generator(shape: Shape) -> PreTrainedModel:
    """A language model as GPT-2 is, with random weights; the same each time."""
    torch.manual_seed(0)
    end = shape.vocabulary - 1
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocabulary, n_embd=shape.width, n_layer=shape.layers, n_head=shape.heads,
            n_positions=2 * POSITIONS, bos_token_id=end, eos_token_id=end, pad_token_id=end,
        )
    )  # fmt: skip


def config_in(folder: str) -> PreTrainedConfig:
    """Raises :class:`GateError` for a folder without the configuration of a model."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise GateError(f"--model {folder!r} holds no model: {first_line(error)}") from error


def model_in(folder: str, *, generates: bool) -> PreTrainedModel:
    """A classifier, or a model that writes text. Raises :class:`GateError` for a folder without a model of this kind."""
    kind = AutoModelForCausalLM if generates else AutoModelForSequenceClassification
    make = partial(kind.from_pretrained, folder, local_files_only=True)
    try:
        model = make() if generates else make(num_labels=LABELS, ignore_mismatched_sizes=True)
    except (OSError, ValueError, KeyError) as error:
        raise GateError(f"--model {folder!r} holds no model for text classification: {first_line(error)}") from error
    if model.config.get_text_config().pad_token_id is None:
        model.config.get_text_config().pad_token_id = 0
    return model
