from collections import Counter

import pytest
import torch

from tests.training.runs import make_data
from training.data import synthetic
from training.data.synthetic import QUESTIONS, counterpart, generate

ROWS = list(generate(900, seed=0))
NUMBER = {synthetic.plural(noun): "plural" for noun in synthetic.NOUNS} | dict.fromkeys(synthetic.NOUNS, "singular")
VERB_NUMBER = dict.fromkeys(synthetic.VERBS, "plural") | {synthetic.singular_verb(v): "singular" for v in synthetic.VERBS}


def answer(text: str) -> str:
    """The three questions answered from the words alone, by rules written again here."""
    question, *words = text.split()
    if question == "rare?":
        return "yes" if any(word in synthetic.HERBS for word in words) else "no"
    if question == "order?":
        before = words[words.index("indeed") - 1]
        return "yes" if (NUMBER | VERB_NUMBER)[before] == "plural" else "no"
    subject = next(word for word in words if word in NUMBER)
    verb = next(word for word in words if word in VERB_NUMBER)
    return "yes" if NUMBER[subject] == VERB_NUMBER[verb] else "no"


def test_every_answer_follows_from_the_words():
    assert [row["label"] for row in ROWS] == [answer(row["text"]) for row in ROWS]


def test_questions_and_answers_are_balanced():
    for question in synthetic.QUESTIONS:
        labels = Counter(row["label"] for row in ROWS if row["question"] == question)
        assert sum(labels.values()) == 300
        assert 110 < labels["yes"] < 190


def test_distractors_carry_no_hint():
    """Between subject and verb lie nouns of both numbers, whatever the answer."""
    agree = [row for row in ROWS if row["question"] == "agree?"]
    last_noun_agrees = Counter()
    for row in agree:
        words = row["text"].split()
        verb = next(i for i, word in enumerate(words) if word in VERB_NUMBER)
        nouns = [word for word in words[:verb] if word in NUMBER]
        if len(nouns) > 1:
            last_noun_agrees[(NUMBER[nouns[-1]] == VERB_NUMBER[words[verb]]) == (row["label"] == "yes")] += 1
    assert 0.35 < last_noun_agrees[True] / sum(last_noun_agrees.values()) < 0.65


def test_gold_heads_form_a_tree_with_the_verb_as_root():
    for row in ROWS:
        words, heads = row["text"].split(), row["heads"]
        assert len(words) == len(heads)
        verb = next(i for i, word in enumerate(words) if word in VERB_NUMBER)
        assert [i for i, head in enumerate(heads) if head == -1] == [0, verb]
        subject = next(i for i, word in enumerate(words) if word in NUMBER)
        assert heads[subject] == verb
        marker = words.index("indeed")
        assert heads[marker] == marker - 1
        for start in range(1, len(words)):
            at, steps = start, 0
            while at != verb:
                at, steps = heads[at], steps + 1
                assert steps <= len(words)


@pytest.mark.parametrize("most", [0, 2])
def test_distractors_are_limited(most):
    for row in generate(60, seed=0, max_distractors=most):
        assert sum(word in synthetic.PREPOSITIONS for word in row["text"].split()) <= most


def test_batches_of_counterparts_are_of_one_question_and_length_and_none_of_a_split():
    data = make_data()
    seen = dict.fromkeys(QUESTIONS, 0)
    for question, batch, other in data.counterparts(60):
        seen[question] += len(batch["labels"])
        assert batch["input_ids"].shape == other["input_ids"].shape
        assert bool((batch["attention_mask"] == 1).all())
        assert torch.equal(batch["labels"] + other["labels"], torch.ones_like(batch["labels"]))
        assert ((batch["input_ids"] != other["input_ids"]).sum(1) == 1).all()
    assert set(seen.values()) == {20}


def place_of_fact(row):
    """The word that an answer hangs on, by rules written again here."""
    words = row["text"].split()
    if row["question"] == "order?":
        return words.index("indeed") - 1
    facts = NUMBER if row["question"] == "agree?" else {*synthetic.HERBS, *synthetic.METALS}
    return next(i for i, word in enumerate(words) if word in facts)


def test_a_counterpart_differs_at_the_word_that_the_answer_hangs_on_and_has_the_opposite_answer():
    for row in ROWS[:300]:
        words = row["text"].split()
        other = counterpart(words, row["question"], row["heads"])
        assert answer(" ".join(other)) == {"yes": "no", "no": "yes"}[row["label"]]
        assert [i for i, (one, two) in enumerate(zip(words, other, strict=True)) if one != two] == [place_of_fact(row)]
        assert counterpart(other, row["question"], row["heads"]) == words
