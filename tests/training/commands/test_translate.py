"""Systems that cannot translate, told before they try; and what is said of those that can."""

import io

import pytest
import transformers as t
from rich.console import Console

from gates.errors import GateError
from training.commands.translate import fitting_ids, load_system, score, show
from training.data.translation import train_subwords

SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 120, "decoder_start_token_id": 0}


def test_a_folder_without_a_tokenizer_is_no_system(tmp_path):
    t.T5ForConditionalGeneration(t.T5Config(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(GateError, match=r"the tokenizer of '.*' has only its \d+ special tokens"):
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


def shown(found, reference):
    console = Console(file=io.StringIO(), width=200)
    show(console, found, score(found, reference, samples=20), "13a")
    return console.file.getvalue()


def test_p_values_are_said_to_be_of_these_systems_alone():
    reference = ["a dog runs over the field", "it rains on the house today", "she reads a long book"]
    found = {"dense": reference, "pruned": ["a dog walks over the field", "it rains on the house", "she reads a book"]}
    said = "p: paired bootstrap over these sentences, for these systems alone; other seeds of theirs may differ."
    assert said in shown(found, reference)
    assert "paired bootstrap" not in shown({"dense": reference}, reference)
