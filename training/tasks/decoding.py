"""How an encoder-decoder translates: greedy and beam search, and what its translations begin with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from gates.errors import GateError
from training.tasks.encoder_decoder import positions
from training.tasks.encoding import encode_targets, shifted_right


@dataclass(frozen=True)
class Decoding:
    """How sentences are translated.

    Args:
        beams: translations that beam search keeps at a time.
        length_penalty: power of the length by which a beam's score is divided; above 0 it favours longer translations.
        max_length: longest translation in tokens. In any case it has at most as many as the model has positions, and at most
            twice its source and 10 more: a translation that does not end by itself is cut there.
        forced_first: token of the target language of a multilingual model, see :func:`begin_with_`.

    Raises:
        GateError: for a length penalty that is no finite number.
    """

    beams: int = 4
    length_penalty: float = 1.0
    max_length: int = 128
    forced_first: int | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.length_penalty):
            raise GateError(f"length_penalty is {self.length_penalty}; expected a finite number, such as 1")


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    decoding: Decoding,
    *,
    beams: int,
) -> Tensor:
    """Token ids ``[batch, target]`` of translations, padded on the right, beginning with the decoder's start token.

    Args:
        model: an encoder-decoder in evaluation mode.
        input_ids, attention_mask: sources ``[batch, source]``.
        decoding: lengths and penalty.
        beams: 1 for greedy decoding.
    """
    searching: dict[str, Any] = {"length_penalty": decoding.length_penalty, "early_stopping": False} if beams > 1 else {}
    longest = min(decoding.max_length, 2 * input_ids.shape[1] + 10)
    if (limit := positions(model.config, "decoder")) is not None:
        longest = min(longest, limit)
    with torch.no_grad():
        ids: Tensor = model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=attention_mask,
            num_beams=beams,
            do_sample=False,
            use_cache=True,
            max_length=None,
            min_length=0,
            min_new_tokens=None,
            max_new_tokens=longest,
            stopping_criteria=[OwnLength(2 * attention_mask.sum(-1) + 10)],
            **searching,
        )
    return ids


class OwnLength(StoppingCriteria):
    """Ends every translation at a length of its own, so that one that does not end by itself does not depend on its company.

    Args:
        lengths: ``[batch]``, in new tokens.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """``[batch x beams]``, from ``[batch x beams, target]``: which of them end here."""
        beams = input_ids.shape[0] // len(self.lengths)
        return input_ids.shape[1] > self.lengths.repeat_interleave(beams)  # one token is the start


def decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> list[str]:
    """Texts of generated ids, on one line each."""
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return [" ".join(text.split()) for text in texts]


def begin_with_(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, language: int) -> None:
    """Have the model translate into a language: its translations begin as the targets it is trained on do.

    Most models see the language's token first in every target. The first mBART sees it as the decoder's start, since its
    targets end in it and are shifted around.

    Args:
        model: whose generation config is set, and goes into exports.
        tokenizer: that is set to this target language.
        language: id of its token.
    """
    assert model.generation_config is not None
    targets = torch.tensor(encode_targets(tokenizer, ["a"]))
    starts = int(shifted_right(model, targets)[0, 0]) == language
    model.generation_config.forced_bos_token_id = None if starts else language
    if starts:
        model.generation_config.decoder_start_token_id = language
