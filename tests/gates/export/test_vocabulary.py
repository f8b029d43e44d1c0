"""Tokenizers that Transformers invents, that do not know a language, and that know little on purpose."""

import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, models, pre_tokenizers

from gates.errors import GateError
from gates.export.checkpoint import check_known, check_vocabulary, save_pruned

TEXTS = ["the film is a delight from the first minute", "a slow and boring story"] * 20
INVENTED = {
    "bert": t.BertConfig, "roberta": t.RobertaConfig, "gpt2": t.GPT2Config, "t5": t.T5Config, "mbart": t.MBartConfig,
    "albert": t.AlbertConfig, "deberta": t.DebertaV2Config, "gemma": t.GemmaConfig, "mpnet": t.MPNetConfig,
    "qwen": t.Qwen2Config, "neox": t.GPTNeoXConfig,
}  # fmt: skip


def invented(config, folder):
    """What Transformers takes for the tokenizer of a model's folder without one."""
    config().save_pretrained(folder)
    return t.AutoTokenizer.from_pretrained(folder)


def of_words(words):
    """A tokenizer that knows these words and nothing else."""
    vocabulary = {token: row for row, token in enumerate(["[PAD]", "[UNK]", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def encoded(tokenizer, texts=TEXTS):
    return tokenizer(list(texts))["input_ids"]


@pytest.mark.parametrize("name", INVENTED)
def test_an_invented_tokenizer_is_refused(name, tmp_path):
    tokenizer = invented(INVENTED[name], tmp_path)
    with pytest.raises(GateError, match=r"^the tokenizer of 'it' has only its \d+ special tokens, so its files may be missing"):
        check_vocabulary(tokenizer, "'it'")
    if name != "mpnet":  # which raises for any text
        with pytest.raises(GateError, match=r"does not know the texts: 100 % of their tokens|finds no tokens in the texts"):
            check_known(tokenizer, encoded(tokenizer), "'it'")


SMALL = {
    "bytes": t.ByT5Tokenizer(), "characters": t.CanineTokenizer(), "bytes of Perceiver": t.PerceiverTokenizer(),
    "its own words": of_words(" ".join(TEXTS).split()), "four words": of_words(["the", "a", "is", "and"]),
}  # fmt: skip


@pytest.mark.parametrize("tokenizer", SMALL.values(), ids=SMALL)
def test_small_vocabularies_are_vocabularies(tokenizer):
    check_vocabulary(tokenizer, "'it'")


@pytest.mark.parametrize("tokenizer", [t.ByT5Tokenizer(), t.CanineTokenizer(), t.PerceiverTokenizer()])
def test_bytes_and_characters_know_every_text(tokenizer):
    check_known(tokenizer, encoded(tokenizer, ["héllo", "你好", "1"]), "'it'")


@pytest.mark.parametrize(("known", "passes"), [(0, False), (4, False), (5, True), (10, True)])
def test_more_than_half_unknown_is_too_much(known, passes):
    words = [f"w{row}" for row in range(10)]
    tokenizer = of_words(words[:known] or ["other"])
    rows = encoded(tokenizer, [" ".join(words)] * 3)
    if passes:
        check_known(tokenizer, rows, "'it'")
    else:
        with pytest.raises(GateError, match=rf"{100 - 10 * known} % of their tokens are \[UNK\]"):
            check_known(tokenizer, rows, "'it'")


def test_few_lost_texts_among_many_do_no_harm():
    tokenizer = of_words(["one"])
    check_known(tokenizer, encoded(tokenizer, [*["one one"] * 1000, *["other"] * 300]), "'it'")
    check_known(tokenizer, [], "'it'")


def test_a_mark_for_a_space_is_no_text():
    """SentencePiece writes one before every unknown word, so that half of the tokens would be known."""
    tokenizer = of_words(["\u2581", "\u2581the"])
    space, unknown, the = tokenizer.convert_tokens_to_ids(["\u2581", "[UNK]", "\u2581the"])
    with pytest.raises(GateError, match="67 % of their tokens"):
        check_known(tokenizer, [[space, unknown, space, unknown, the]], "'it'")
    check_vocabulary(tokenizer, "'it'")


@pytest.mark.parametrize("in_processor", [False, True])
def test_a_model_is_not_saved_with_an_invented_tokenizer(in_processor, tmp_path):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 40}
    model = t.BertModel(t.BertConfig(**small))
    tokenizer = invented(t.BertConfig, tmp_path / "config")
    if in_processor:
        tokenizer = type("Processor", (), {"tokenizer": tokenizer, "save_pretrained": tokenizer.save_pretrained})()
    with pytest.raises(GateError, match="has only its 5 special tokens"):
        save_pruned(model, tmp_path / "export", torch.tensor([1.0, 0.0]), tokenizer=tokenizer)
    assert not (tmp_path / "export").exists()
