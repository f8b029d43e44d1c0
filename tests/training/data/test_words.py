"""Words and the pieces that they are cut into."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from gates.errors import GateError
from training.data.tags import encode_words
from training.data.trees import read_lines


def make_tokenizer(*, spaces):
    """One token per letter between special tokens; with spaces, a mark of its own for the space before a word."""
    letters = ["Ġ", *"abc"] if spaces else [*"abc", "##a", "##b", "##c"]
    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []) if spaces else models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if spaces else pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def test_every_piece_has_its_word():
    tokenizer = make_tokenizer(spaces=False)
    (pieces,) = encode_words(tokenizer, [["ab", "c", " ", "cc"]], None)  # the third has no piece
    assert tokenizer.convert_ids_to_tokens(pieces.ids) == ["[CLS]", "a", "##b", "c", "c", "##c", "[SEP]"]
    assert pieces.words == [-1, 0, 0, 1, 3, 3, -1]


def test_words_behind_a_space_keep_it():
    tokenizer = make_tokenizer(spaces=True)
    (pieces,) = encode_words(tokenizer, [["ab", "c"]], None)
    assert tokenizer.convert_ids_to_tokens(pieces.ids) == ["[CLS]", "a", "b", "Ġ", "c", "[SEP]"]
    assert pieces.words == [-1, 0, 0, 1, 1, -1]


def test_sentences_that_are_too_long_or_without_a_piece_are_left_out():
    tokenizer = make_tokenizer(spaces=True)
    found = encode_words(tokenizer, [["ab"], ["abc"], ["z"]], 4)
    assert [pieces is None for pieces in found] == [False, True, True]


def test_lines_of_texts(tmp_path):
    (tmp_path / "texts.txt").write_text("one two\n\n three \n")
    assert read_lines(str(tmp_path / "texts.txt")) == ["one two", "three"]
    with pytest.raises(GateError, match="does not exist"):
        read_lines(str(tmp_path / "none.txt"))
