"""The languages of multilingual translators, as their tokenizers name them."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from gates.errors import GateError


def set_languages(tokenizer: PreTrainedTokenizerBase, *, source: str | None, target: str | None) -> None:
    """Tell a tokenizer which languages it reads and writes; None leaves what it has.

    Raises:
        GateError: for a language that it does not know.
    """
    for attribute, language in (("src_lang", source), ("tgt_lang", target)):
        if language is not None:
            language_token(tokenizer, language)
            setattr(tokenizer, attribute, language)


def language_token(tokenizer: PreTrainedTokenizerBase, language: str) -> int:
    """The id of a language's token.

    Raises:
        GateError: for a language that the tokenizer does not know.
    """
    try:  # M2M100 writes the tokens in another way than the names
        token = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)(language)
    except KeyError:
        token = None
    if token is None or token == tokenizer.unk_token_id:
        raise GateError(
            f"the tokenizer does not know the language {language!r}; expected one of its language tokens, such as en_XX in "
            "mBART, eng_Latn in NLLB or en in M2M100"
        )
    assert isinstance(token, int)
    return token
