"""Whether a tokenizer knows what it reads.

Of a folder with a model and no tokenizer files, Transformers 5 makes an empty tokenizer of special tokens alone. Every text is
then unknown tokens, or none at all, and a model would be trained, measured and saved with it without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from gates.errors import GateError

MOSTLY = 0.5
"""Share of unknown tokens above which texts are not read but lost."""
SAMPLED = 500
"""Texts that are looked at."""
SPACES = " \u2581\u0120"
"""Marks for a space in a vocabulary, which stand for no text by themselves."""


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Whether a tokenizer has any token that stands for text. How many is not asked: bytes, characters and few words will do.

    Args:
        tokenizer: any; one whose class does not tell its vocabulary passes.
        name: what an error calls it.

    Raises:
        GateError: if all its tokens are special ones or spaces.
    """
    try:
        vocabulary = tokenizer.get_vocab()
    except NotImplementedError:
        return
    special = {*tokenizer.all_special_tokens}
    if not any(token not in special and token.strip(SPACES) for token in vocabulary):
        raise GateError(
            f"the tokenizer of {name} has {len(vocabulary)} special tokens and no other, as Transformers makes one where the "
            "tokenizer's files are missing; save the model's own tokenizer there, or name the folder or hub name of one"
        )


def check_known(tokenizer: PreTrainedTokenizerBase, encoded: Sequence[Sequence[int]], name: str) -> None:
    """Whether a tokenizer knows most of the texts that it has encoded; some of them, evenly spread, are looked at.

    Args:
        tokenizer: of the texts.
        encoded: token ids of texts that are not empty, with special tokens or without, not padded.
        name: what an error calls the tokenizer.

    Raises:
        GateError: if it made no tokens of the texts, or more than half of them are the unknown token.
    """
    if not len(encoded):
        return
    sampled = [encoded[row] for row in range(0, len(encoded), max(1, len(encoded) // SAMPLED))]
    others = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "cls", "sep")}
    # Where the unknown token has another use too, as of GPT-2, which knows every byte, it does not tell anything.
    unknown = None if tokenizer.unk_token_id in others else tokenizer.unk_token_id
    special = {*tokenizer.all_special_ids} - {unknown}
    ids = [token for row in sampled for token in row if token not in special]
    if not ids:
        raise GateError(
            f"the tokenizer of {name} makes no tokens of the texts; give the tokenizer that the model was trained with"
        )
    lost = sum(token == unknown for token in ids)
    text = {token for token in {*ids} if token != unknown and str(tokenizer.convert_ids_to_tokens(token)).strip(SPACES)}
    read = sum(token in text for token in ids)
    if lost > MOSTLY * (lost + read):
        raise GateError(
            f"the tokenizer of {name} does not know the texts: {100 * lost / (lost + read):.0f} % of their tokens are "
            f"{tokenizer.unk_token}; give the tokenizer that the model was trained with, or texts in its language"
        )
