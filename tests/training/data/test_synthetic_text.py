"""The embedded stories: the same from the same seed, with words that follow from words far before them."""

from itertools import pairwise

from tests.training.causal_runs import make_data
from training.data.synthetic import ADJECTIVES, PLURALS, VERBS
from training.data.synthetic_text import FIRST_NAMES, PRONOUN, PRONOUNS, SURNAMES, build_document_tokenizer, generate_documents


def test_the_stories_are_a_function_of_the_seed():
    assert generate_documents(20, seed=1) == generate_documents(20, seed=1)
    assert set(generate_documents(20, seed=1)).isdisjoint(generate_documents(20, seed=2))
    assert max(text.count("near") + text.count("with") for text in generate_documents(50, seed=1, max_distractors=0)) == 0


def test_a_name_keeps_its_surname_throughout_a_story_and_has_others_elsewhere():
    found = {name: set() for name in FIRST_NAMES}
    for text in generate_documents(200, seed=0):
        words, called = text.split(), {}
        for word, after in pairwise(words):
            if word in FIRST_NAMES:
                assert after in SURNAMES
                assert called.setdefault(word, after) == after
        for name, surname in called.items():
            found[name].add(surname)
    assert min(map(len, found.values())) > 6


def test_pronouns_are_those_of_the_sentences_name_and_verbs_agree():
    for text in generate_documents(200, seed=0):
        for sentence in text.split(" ."):
            words = sentence.split()
            if pronoun := [word for word in words if word in PRONOUNS]:
                assert pronoun == [PRONOUN[words[0]]]
            elif words and words[0] == "the":  # its first noun and its verb are both plural or neither
                noun = words[2] if words[1] in ADJECTIVES else words[1]
                verbs = [word for word in words if word.removesuffix("s") in VERBS]
                assert (noun in PLURALS) == (verbs[0] in PLURALS)


def test_the_tokenizer_knows_every_word_and_brings_it_back():
    tokenizer = build_document_tokenizer()
    for text in generate_documents(100, seed=3):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_splits_are_different_stories():
    data = make_data()
    documents = data.load_documents()
    assert not {*documents["train"]} & {*documents["test"]}
    assert [len(documents[split]) for split in ("train", "select", "test")] == [64, 8, 12]
