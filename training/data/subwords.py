"""A vocabulary of subwords for both languages of a translator, trained on the training pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import get_args

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gates.errors import GateError
from training.config.data import Subwords

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
SPECIAL = [PAD, END, UNKNOWN]


def train_subwords(
    texts: Iterable[str], *, kind: Subwords = "bpe", vocab_size: int = 8000, max_length: int = 128
) -> PreTrainedTokenizerBase:
    """A joint vocabulary: byte-pair encoding (Sennrich et al. 2016) or a unigram model (Kudo 2018).

    Words keep a mark for the space before them, and punctuation marks are words of their own, so that decoded text is
    detokenised text. Texts are put into Unicode's composed form and white space becomes single spaces; nothing else changes.

    Args:
        texts: of both languages.
        kind: ``bpe`` or ``unigram``.
        vocab_size: largest number of tokens, special ones included; fewer where the texts have no more.
        max_length: stated as the tokenizer's.

    Raises:
        GateError: for another kind, or if the size is too small for the characters of the texts.
    """
    if kind not in get_args(Subwords):
        raise GateError(f"subwords is {kind!r}; expected one of {', '.join(map(repr, get_args(Subwords)))}")
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN) if kind == "bpe" else models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = list(texts)
    normal = tokenizer.normalizer.normalize_str
    characters = {character for text in texts for character in normal(text) if not character.isspace()}
    smallest = len(SPECIAL) + len(characters) + 1
    if vocab_size < smallest:
        raise GateError(
            f"vocab_size is {vocab_size}, but the training pairs have {len(characters)} different characters; expected at "
            f"least {smallest}, or training data in fewer alphabets"
        )
    common = {"vocab_size": vocab_size, "special_tokens": SPECIAL, "show_progress": False}
    trainer = (
        trainers.BpeTrainer(**common) if kind == "bpe" else trainers.UnigramTrainer(unk_token=UNKNOWN, **common)  # type: ignore[arg-type]
    )
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "unigram":
        tokenizer.model = _in_one_order(tokenizer)
    return wrapped(tokenizer, max_length=max_length)


def _in_one_order(tokenizer: Tokenizer) -> models.Unigram:
    """The trained unigram model with its tokens in an order that does not change from training to training: that of their
    scores, but for the last digits, which depend on how threads shared the work."""
    vocabulary = [(token, score) for token, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    others = sorted(vocabulary[len(SPECIAL) :], key=lambda item: (-round(item[1], 6), item[0]))
    ordered = [*vocabulary[: len(SPECIAL)], *((token, round(score, 6)) for token, score in others)]
    return models.Unigram(ordered, unk_id=SPECIAL.index(UNKNOWN))


def of_words(words: Iterable[str], *, max_length: int) -> PreTrainedTokenizerBase:
    """One token per word of a generated language, ``words </s>``."""
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return wrapped(tokenizer, max_length=max_length)


def wrapped(tokenizer: Tokenizer, *, max_length: int) -> PreTrainedTokenizerBase:
    """A tokenizer with the special tokens above as Transformers knows it, ``text </s>``."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN, model_max_length=max_length
    )
