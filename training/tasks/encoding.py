"""How sentences, their translations and documents become token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gates.errors import GateError

IGNORED = -100
"""Label of padding, which no loss counts."""


def encode_sources(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, prefix: str = "") -> list[list[int]]:
    """Token ids of every text behind the prefix, with the special tokens that the tokenizer puts around a source.

    Names of special tokens within a text are text, such as ``</s>`` in a line of a web page.
    """
    ids: list[list[int]] = tokenizer([prefix + text for text in texts])["input_ids"]
    for row in _naming_special_tokens(tokenizer, texts):
        ids[row] = tokenizer(prefix + texts[row], split_special_tokens=True)["input_ids"]
    return ids


def encode_targets(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The same of targets. Each has an end token, by which a model learns to stop: if the tokenizer puts none, it is added.

    Raises:
        GateError: for a tokenizer that has no end token.
    """
    ids: list[list[int]] = tokenizer(text_target=list(texts))["input_ids"]
    for row in _naming_special_tokens(tokenizer, texts):
        ids[row] = tokenizer(text_target=texts[row], split_special_tokens=True)["input_ids"]
    ends = [end for end in (tokenizer.eos_token_id, tokenizer.sep_token_id) if end is not None]
    if not ends:
        raise GateError("the tokenizer has no end token, without which no translation ends; give another with --data.tokenizer")
    # Behind the end there may be one more token, the language in mBART.
    return [own if {*ends} & {*own[-2:]} else [*own, ends[0]] for own in ids]


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of every document, from its start token to its end token, if there is one.

    Names of special tokens within a text are text.

    Raises:
        GateError: for a tokenizer without a token that a document can begin with.
    """
    start, end = start_token(tokenizer), end_token(tokenizer)
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    for row in _naming_special_tokens(tokenizer, texts):
        ids[row] = tokenizer(texts[row], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [[start, *own, *([] if end is None else [end])] for own in ids]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Id of the token from which a document's first token is predicted: that of a beginning, or that of an end before it.

    Raises:
        GateError: if the tokenizer has neither.
    """
    known = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    start = next((token for token in known if token is not None), None)
    if start is None:
        raise GateError(
            "the tokenizer has neither a start nor an end token, from which a document's first token could be predicted; give "
            "another with --data.tokenizer"
        )
    return int(start)


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of the token that ends a document; None if the tokenizer has none."""
    known = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    return next((int(token) for token in known if token is not None), None)


def tokens_of(labels: Tensor) -> Tensor:
    """Tokens to predict of every example, ``[batch]``."""
    return (labels != IGNORED).sum(-1)


def _naming_special_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Rows of the texts that contain the name of a special token."""
    names = re.compile("|".join(re.escape(token) for token in tokenizer.all_special_tokens if token))
    return [row for row, text in enumerate(texts) if names.search(text)]


def shifted_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """The decoder's input ``[batch, target]``: the labels one place to the right, behind the start token, padding as pad."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        own: Tensor = model.prepare_decoder_input_ids_from_labels(labels=labels)  # type: ignore[operator]
        return own
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == IGNORED, pad)
