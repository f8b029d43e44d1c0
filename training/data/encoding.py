"""Sentences to token ids, at the speed of the tokenizer's own library."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

SEGMENTS = "token_type_ids"


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], pairs: Sequence[str] | None = None, *, limit: int
) -> dict[str, list[list[int]]]:
    """Token ids of every text or pair of texts, cut to ``limit`` tokens, and its segments where the tokenizer tells any.

    Equal to what the tokenizer returns when it is called. Where it wraps one of the library ``tokenizers``, that is asked
    itself, since offsets and masks of every example take longer than its ids. Two of the examples are encoded both ways; a
    tokenizer that does more than its library does all of them.

    Args:
        tokenizer: of the model.
        texts: first or only texts; one at least.
        pairs: second texts.
        limit: longest example, in tokens.
    """
    rows = [texts] if pairs is None else [texts, pairs]

    def called(*some: Sequence[str]) -> dict[str, list[list[int]]]:
        return dict(tokenizer(*map(list, some), truncation=True, max_length=limit, return_attention_mask=False))

    if not tokenizer.is_fast or tokenizer.split_special_tokens:
        return called(*rows)
    probed = (0, max(range(len(texts)), key=lambda row: len(texts[row])))
    known = called(*([column[row] for row in probed] for column in rows))  # sets the library's truncation and padding, too
    examples = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
    found = tokenizer.backend_tokenizer.encode_batch_fast(examples)
    encoded = {"input_ids": [example.ids for example in found]}
    if SEGMENTS in known:
        encoded[SEGMENTS] = [example.type_ids for example in found]
    if {name: [values[row] for row in probed] for name, values in encoded.items()} != known:
        return called(*rows)
    return encoded
