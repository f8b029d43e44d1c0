import pytest
from transformers import AutoTokenizer

from gates.errors import GateError
from training.data.translation import train_subwords

TEXTS = [
    "A man in a blue shirt, standing on a ladder.",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter.",
    "Two young (white) males are outside - near many bushes!",
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
] * 5


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_text_comes_back_as_it_was(kind):
    tokenizer = train_subwords(TEXTS, kind=kind, vocab_size=120)
    ids = tokenizer(TEXTS)["input_ids"]
    assert len(tokenizer) <= 120
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == TEXTS
    assert all(own[-1] == tokenizer.eos_token_id and tokenizer.unk_token_id not in own for own in ids)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_reproducible_and_survives_saving(kind, tmp_path):
    tokenizer = train_subwords(TEXTS, kind=kind, vocab_size=120)
    assert train_subwords(TEXTS, kind=kind, vocab_size=120).get_vocab() == tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert again.pad_token_id == tokenizer.pad_token_id


def test_characters_are_counted_in_their_composed_form():
    texts = ["".join(chr(code) + "\u0301" for code in map(ord, "aeiou"))]  # 6 code points, 5 letters
    train_subwords(texts, vocab_size=3 + 5 + 1)
    with pytest.raises(GateError, match="5 different characters; expected at least 9"):
        train_subwords(texts, vocab_size=8)
