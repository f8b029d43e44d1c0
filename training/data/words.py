"""Sentences of words as pieces of a tokenizer, with the word that every piece belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from gates.errors import GateError

AT_ONCE = 1000


@dataclass(frozen=True)
class Pieces:
    """A sentence as the model reads it.

    Args:
        ids: tokens, special ones included.
        words: the word of each token, by number; -1 for special tokens.
    """

    ids: list[int]
    words: list[int]


def encode_words(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], limit: int | None
) -> list[Pieces | None]:
    """The pieces of every sentence; None for a sentence that is longer than the model takes, or has no piece.

    A tokenizer that tells words apart by the space before them gets it before every word but the first.

    Args:
        tokenizer: a fast one, which alone says what belongs to which word.
        sentences: their words.
        limit: the most tokens that the model takes; None for any number.

    Raises:
        GateError: for a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise GateError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not say which pieces make a word; give a model with a "
            "tokenizer.json"
        )
    space = " " if _spaces_matter(tokenizer) else ""
    found: list[Pieces | None] = []
    for first in range(0, len(sentences), AT_ONCE):
        part = [[words[0], *(space + word for word in words[1:])] for words in sentences[first : first + AT_ONCE]]
        encoded = tokenizer(part, is_split_into_words=True, truncation=False, verbose=False)
        for row, ids in enumerate(encoded["input_ids"]):
            words = [-1 if word is None else word for word in encoded.word_ids(row)]
            fits = (limit is None or len(ids) <= limit) and max(words, default=-1) >= 0
            found.append(Pieces(list(ids), words) if fits else None)
    return found


def _spaces_matter(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a word has other pieces behind a space."""
    alone, spaced = (
        tokenizer([["a", word]], is_split_into_words=True, add_special_tokens=False)["input_ids"][0] for word in ("a", " a")
    )
    return bool(alone != spaced)
