"""Systems that cannot translate, told before they try."""

import pytest
import transformers as t

from gates.errors import GateError
from training.commands.translate import fitting_ids, load_system
from training.data.subwords import train_subwords

SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 120, "decoder_start_token_id": 0}


def test_a_folder_without_a_tokenizer_is_no_system(tmp_path):
    t.T5ForConditionalGeneration(t.T5Config(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(GateError, match=r"the tokenizer of '.*' has \d+ special tokens and no other"):
        load_system(str(tmp_path))


def test_sources_in_a_language_that_the_tokenizer_does_not_know(tmp_path):
    model = t.T5ForConditionalGeneration(t.T5Config(**SIZES))
    model.save_pretrained(tmp_path)
    train_subwords(["the fox sees the king"] * 5, vocab_size=60).save_pretrained(tmp_path)
    found, tokenizer = load_system(str(tmp_path))
    assert len(fitting_ids(found, tokenizer, ["the king", "", "the fox"])) == 3
    assert len(fitting_ids(found, tokenizer, ["", " "])) == 2
    with pytest.raises(GateError, match="does not know the texts: 100 % of their tokens are <unk>"):
        fitting_ids(found, tokenizer, ["\u043b\u0438\u0441\u0430", ""])
