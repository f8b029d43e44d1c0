"""What relevance is propagated from: the logit of what a model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gates.errors import GateError


@dataclass(frozen=True)
class Predictions:
    """Logits that a model's predictions rest on.

    Args:
        logits: ``[batch, steps]``, in the graph of the forward pass.
        counted: whether each is a prediction, bool ``[batch, steps]``; steps behind the end of a text are none.
    """

    logits: Tensor
    counted: Tensor


Target = Callable[[nn.Module, Mapping[str, Tensor], Any], Predictions]
"""From a model, its inputs and its output to predictions."""


def top_logits(model: nn.Module, inputs: Mapping[str, Tensor], output: Any) -> Predictions:
    """The largest logit of every prediction: a classifier's class, a causal decoder's next token behind the last one, and every
    token of an encoder-decoder's text.

    Args:
        model: Transformers model.
        inputs: that it was called with; ``attention_mask`` says where texts end, and ``decoder_attention_mask`` which steps of
            a decoder count (all by default).
        output: its output, with logits.

    Raises:
        GateError: for a model without such logits.
    """
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
        raise GateError(
            f"{type(model).__name__} gives no logits of classes or tokens; use a model with a head, or give a target function"
        )
    if logits.dim() == 2:
        return Predictions(logits.amax(-1, keepdim=True), torch.ones_like(logits[:, :1], dtype=torch.bool))
    config: Any = model.config
    if config.is_encoder_decoder:
        counted = inputs.get("decoder_attention_mask", torch.ones(logits.shape[:2], device=logits.device))
        return Predictions(logits.amax(-1), counted.bool())
    if not (isinstance(model, PreTrainedModel) and model.can_generate()):
        raise GateError(
            f"{type(model).__name__} predicts tokens in the middle of texts, so that it has no one prediction; give a target "
            "function"
        )
    mask = inputs.get("attention_mask", torch.ones(logits.shape[:2], device=logits.device))
    last = (mask * torch.arange(1, 1 + mask.shape[1], device=mask.device)).argmax(-1)
    found = logits[torch.arange(len(last), device=last.device), last].amax(-1, keepdim=True)
    return Predictions(found, torch.ones_like(found, dtype=torch.bool))


def writes(model: PreTrainedModel) -> bool:
    """Whether a model is an encoder-decoder that writes a text, so that there is a prediction for every token."""
    return bool(model.config.is_encoder_decoder) and model.can_generate()


@torch.no_grad()
def with_written_text(model: PreTrainedModel, inputs: Mapping[str, Tensor], *, max_new_tokens: int) -> dict[str, Tensor]:
    """An encoder-decoder's inputs with the text that it writes for them by greedy search.

    Args:
        model: in evaluation mode.
        inputs: of the encoder.
        max_new_tokens: longest text.
    """
    ids = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens)  # type: ignore[operator]
    return with_text(model, inputs, ids)


def with_text(model: PreTrainedModel, inputs: Mapping[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    """An encoder-decoder's inputs with a text, so that the decoder predicts all its tokens at once, each from those before it.

    Args:
        model: whose generation config says which token ends a text.
        inputs: of the encoder.
        ids: of the text, ``[batch, 1 + tokens]``, beginning with the decoder's start token. What comes behind the first end is
            padding.
    """
    config = model.generation_config
    ends = torch.tensor([] if config is None or config.eos_token_id is None else config.eos_token_id, device=ids.device)
    ended = torch.isin(ids[:, 1:-1], ends.flatten()).cumsum(-1) > 0
    counted = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ~ended], dim=-1)
    return {**inputs, "decoder_input_ids": ids[:, :-1], "decoder_attention_mask": counted.long()}
