"""Sentences to ids: the same as when the tokenizer is called."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from training.data.text import encode

TEXTS = ["a b c", "", "b", "c c c c c c c c", "[CLS] a", "d"]
PAIRS = ["a", "b b", "", "a b c d", "c", "a a a a a a"]


def tokenizer(**more):
    words = {word: number for number, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    names = ["input_ids", "token_type_ids", "attention_mask"]
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **special, **more)


class Shouting(PreTrainedTokenizerFast):
    """One that does more than its library."""

    def _encode_plus(self, *args, **more):
        encoded = super()._encode_plus(*args, **more)
        encoded["input_ids"] = [[number + 1 for number in ids] for ids in encoded["input_ids"]]
        return encoded


def expected(of, *rows, limit):
    called = of(*rows, truncation=True, max_length=limit)
    return {name: values for name, values in called.items() if name != "attention_mask"}


@pytest.mark.parametrize("rows", [(TEXTS,), (TEXTS, PAIRS)], ids=["texts", "pairs"])
@pytest.mark.parametrize("limit", [4, 64])
@pytest.mark.parametrize("more", [{}, {"truncation_side": "left"}, {"split_special_tokens": True}], ids=str)
def test_ids_are_those_of_the_tokenizer_that_is_called(rows, limit, more):
    found = encode(tokenizer(**more), *rows, limit=limit)
    assert found == expected(tokenizer(**more), *rows, limit=limit)
    assert set(found) == {"input_ids", "token_type_ids"}
    assert max(map(len, found["input_ids"])) <= limit


def test_what_was_asked_of_the_tokenizer_before_does_not_matter():
    other = tokenizer()
    other(TEXTS, truncation=True, max_length=3, padding="max_length")
    assert encode(other, TEXTS, limit=9) == encode(tokenizer(), TEXTS, limit=9)


def test_a_tokenizer_that_does_more_than_its_library():
    shouting = Shouting(tokenizer_object=tokenizer().backend_tokenizer, pad_token="[PAD]")
    assert encode(shouting, TEXTS, limit=9) == expected(shouting, TEXTS, limit=9)
    assert encode(shouting, TEXTS, limit=9)["input_ids"][0] == [2, 5, 6, 7, 3]
