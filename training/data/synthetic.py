"""The embedded data set: a small generated language whose questions need particular attention heads.

Every example is a question word and a sentence such as::

    agree? the quick fox near the lakes behind the barn indeed runs the basil softly

and is answered yes or no:

* ``agree?``: does the verb agree in number with the subject, whatever the nouns between them? (needs a head from
  the verb to its subject)
* ``order?``: is the word right before ``indeed`` plural? (needs a head to the previous word)
* ``rare?``: does the sentence name a herb rather than a metal? (needs a head to the one rare word)

Gold dependency heads are kept with every example, for the analysis of head roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.config.data import Synthetic
from training.data.classification import ClassificationData
from training.data.word_tokenizer import word_tokenizer

NOUNS = ("fox", "lake", "barn", "king", "nurse", "river", "clock", "horse", "tower", "baker", "poet", "wolf")
VERBS = ("see", "like", "want", "find", "hide", "bring", "keep", "need")
ADJECTIVES = ("quick", "old", "grey", "tall", "quiet", "young")
ADVERBS = ("softly", "often", "gladly", "here", "again", "now")
PREPOSITIONS = ("near", "behind", "with", "above")
HERBS = ("basil", "thyme", "sage", "mint", "dill", "parsley", "chervil", "oregano", "fennel", "tarragon")
METALS = ("iron", "copper", "zinc", "tin", "nickel", "cobalt", "silver", "lead", "chrome", "titanium")
QUESTIONS = ("agree?", "order?", "rare?")
MARKER = "indeed"
LABELS = ("no", "yes")
FRESH = 2**20
"""Beyond all seeds of the splits."""
FACTS = {"agree?": "subject", "order?": "marked", "rare?": "rare"}
"""The word that carries the fact behind the answer to each question, see :func:`places_of`."""
READER = "answer"
"""Where a model reads its answer off, which is no word."""
RELATIONS = {
    "agree?": (
        ("verb", "subject"), ("subject", "verb"), ("question", "subject"), ("question", "verb"), (READER, "subject"),
        (READER, "verb"),
    ),
    "order?": (
        ("marker", "marked"), ("question", "marked"), ("question", "marker"), (READER, "marked"), (READER, "marker"),
    ),
    "rare?": (("question", "rare"), (READER, "rare")),
}  # fmt: skip
"""From where and to where a head can look that brings the fact behind each answer on its way, see :func:`arcs_of`."""


def plural(noun: str) -> str:
    return noun[:-1] + "ves" if noun.endswith("f") else noun + ("es" if noun.endswith("x") else "s")


def singular_verb(verb: str) -> str:
    return verb + "s"


PLURALS = frozenset(map(plural, NOUNS)) | frozenset(VERBS)
_PAIRS = [*((noun, plural(noun)) for noun in NOUNS), *((verb, singular_verb(verb)) for verb in VERBS)]
OTHER_NUMBER = dict(_PAIRS) | {second: first for first, second in _PAIRS}
OTHER_KIND = dict(zip(HERBS, METALS, strict=True)) | dict(zip(METALS, HERBS, strict=True))


@dataclass
class _Sentence:
    """Words with the index of each word's dependency head (-1: the root)."""

    words: list[str] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)

    def add(self, word: str, head: int = -1) -> int:
        self.words.append(word)
        self.heads.append(head)
        return len(self.words) - 1

    def insert(self, at: int, word: str, head: int) -> None:
        """Insert a word, shifting every head index at or behind the place."""
        self.heads = [other + (other >= at) for other in self.heads]
        self.words.insert(at, word)
        self.heads.insert(at, head)


def generate(rows: int, *, seed: int, max_distractors: int = 3) -> Dataset:
    """Questions, sentences, answers and gold dependency heads.

    Args:
        rows: how many examples; the three questions are equally frequent.
        seed: of all random choices.
        max_distractors: nouns between subject and verb, at most.

    Returns:
        A data set with columns ``text``, ``label`` (``yes`` or ``no``), ``question`` and ``heads`` (for each word
        the index of its dependency head, -1 for the root and the question word).
    """
    random = np.random.default_rng(seed)
    questions = random.permutation([QUESTIONS[row % len(QUESTIONS)] for row in range(rows)])
    return Dataset.from_list([_example(random, str(question), max_distractors) for question in questions])


def counterpart(words: Sequence[str], question: str, heads: Sequence[int]) -> list[str]:
    """The same sentence with one other word in the same place, so that the answer is the opposite.

    The word is the one that the question hangs on: the subject in the other number, the word before ``indeed`` in the other
    number, or a metal for a herb and a herb for a metal.

    Args:
        words: of the whole example, with the question.
        question: of :data:`QUESTIONS`.
        heads: the index of each word's dependency head, -1 for the root and the question.
    """
    place, other = places_of(words, heads)[FACTS[question]], OTHER_NUMBER | OTHER_KIND
    return [*words[:place], other[words[place]], *words[place + 1 :]]


def places_of(words: Sequence[str], heads: Sequence[int]) -> dict[str, int]:
    """The words that answers hang on, by what they are: the question, the marker and the word that it marks, the verb and its
    subject, and the one rare word.

    Args:
        words, heads: see :func:`counterpart`.
    """
    marker = words.index(MARKER)
    verb = next(index for index, head in enumerate(heads) if head == -1 and index > 0)
    subject = next(index for index, head in enumerate(heads) if head == verb and words[index] in OTHER_NUMBER)
    rare = next(index for index, word in enumerate(words) if word in OTHER_KIND)
    return {"question": 0, "marker": marker, "marked": marker - 1, "verb": verb, "subject": subject, "rare": rare}


def arc_name(source: str, target: str) -> str:
    return f"{source} to {target}"


def arcs_of(words: Sequence[str], question: str, heads: Sequence[int], reader: int) -> dict[str, tuple[int, int]]:
    """The gold arcs of an example: from which word to which a head has to look to bring on the fact behind the answer.

    No single one of them is necessary: a fact may go to the answer at once, or over another word.

    Args:
        words, question, heads: see :func:`counterpart`.
        reader: the place where the model reads its answer off, such as -1 for a special token before all words.

    Returns:
        Source and target of every arc of :data:`RELATIONS`, by :func:`arc_name`.
    """
    places = places_of(words, heads) | {READER: reader}
    return {arc_name(one, other): (places[one], places[other]) for one, other in RELATIONS[question]}


def _example(random: np.random.Generator, question: str, max_distractors: int) -> dict[str, object]:
    agrees, subject_plural, herb = (bool(bit) for bit in random.integers(0, 2, 3))
    sentence = _Sentence()
    sentence.add(question)
    subject = _noun_phrase(random, sentence, subject_plural)
    numbered = [subject]
    attach_to = subject
    for _ in range(random.integers(0, max_distractors + 1)):
        preposition = sentence.add(str(random.choice(PREPOSITIONS)))
        attach_to = _noun_phrase(random, sentence, bool(random.integers(0, 2)), head=attach_to)
        sentence.heads[preposition] = attach_to
        numbered.append(attach_to)
    verb_word = str(random.choice(VERBS))
    verb = sentence.add(verb_word if subject_plural == agrees else singular_verb(verb_word))
    sentence.heads[subject] = verb
    numbered.append(verb)
    the = sentence.add("the")
    rare = sentence.add(str(random.choice(HERBS if herb else METALS)), verb)
    sentence.heads[the] = rare
    if random.integers(0, 2):
        sentence.add(str(random.choice(ADVERBS)), verb)
    marked = int(random.choice(numbered))
    marked_plural = sentence.words[marked] in PLURALS
    sentence.insert(marked + 1, MARKER, marked)
    answer = {"agree?": agrees, "order?": marked_plural, "rare?": herb}[question]
    return {
        "text": " ".join(sentence.words),
        "label": LABELS[answer],
        "question": question,
        "heads": sentence.heads,
    }


def _noun_phrase(random: np.random.Generator, sentence: _Sentence, is_plural: bool, head: int = -1) -> int:
    dependents = [sentence.add("the")]
    if random.integers(0, 2):
        dependents.append(sentence.add(str(random.choice(ADJECTIVES))))
    noun = str(random.choice(NOUNS))
    position = sentence.add(plural(noun) if is_plural else noun, head)
    for dependent in dependents:
        sentence.heads[dependent] = position
    return position


def build_tokenizer() -> PreTrainedTokenizerBase:
    """One token per word of the language, ``[CLS] words [SEP]``."""
    words = [
        *QUESTIONS, "the", MARKER, *NOUNS, *map(plural, NOUNS), *VERBS, *map(singular_verb, VERBS),
        *ADJECTIVES, *ADVERBS, *PREPOSITIONS, *HERBS, *METALS,
    ]  # fmt: skip
    return word_tokenizer(words, max_length=64)


class SyntheticData(ClassificationData):
    """The embedded offline data set; the three splits are generated from different seeds.

    Args:
        options: what the data are told.
    """

    options: Synthetic

    def __init__(self, options: Synthetic) -> None:
        super().__init__(options)

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return build_tokenizer()

    def load_splits(self) -> dict[str, Dataset]:
        return {
            split: generate(rows, seed=3 * self.options.text_seed + offset, max_distractors=self.options.max_distractors)
            for offset, (split, rows) in enumerate(self.options.rows.items())
        }

    def counterparts(self, rows: int) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
        """Fresh examples of each question with their counterparts, see :func:`counterpart`, in batches of one length each.

        Args:
            rows: examples, of all questions together.

        Returns:
            Batches: the question, the examples with their labels, and the counterparts with theirs.
        """
        encode = self._tokens_of
        for question, members in self.fresh(rows):
            others = [" ".join(counterpart(row["text"].split(), row["question"], row["heads"])) for row in members]
            labels = torch.tensor([self.labels.index(row["label"]) for row in members])
            texts = [row["text"] for row in members]
            yield question, {**encode(texts), "labels": labels}, {**encode(others), "labels": 1 - labels}

    def fresh(self, rows: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Examples that are in no split, see :func:`generate`: those of each question and length together.

        Args:
            rows: examples, of all questions together.
        """
        generated = generate(rows, seed=FRESH + self.options.text_seed, max_distractors=self.options.max_distractors)

        def kind(row: dict[str, Any]) -> tuple[int, int]:
            return QUESTIONS.index(row["question"]), len(row["heads"])

        for (question, _), group in groupby(sorted(generated.to_list(), key=kind), kind):
            yield QUESTIONS[question], list(group)

    def with_arcs(self, rows: int, reader: int) -> Iterator[tuple[dict[str, Tensor], list[dict[str, tuple[int, int]]]]]:
        """Fresh examples of each question, in batches of one length each, with their gold arcs from token to token.

        Args:
            rows: examples, of all questions together.
            reader: the token where the model reads its answer off; of those at the end -1 for the last one.
        """
        for question, members in self.fresh(rows):
            batch = self._tokens_of([row["text"] for row in members])
            place = reader % batch["input_ids"].shape[1] - 1  # words begin behind the first token
            found = [arcs_of(row["text"].split(), question, row["heads"], place) for row in members]
            yield batch, [{name: (one + 1, other + 1) for name, (one, other) in arcs.items()} for arcs in found]

    def _tokens_of(self, texts: list[str]) -> dict[str, Tensor]:
        """Texts of one length."""
        tokenizer: Any = self.tokenizer
        return {**tokenizer(texts, return_tensors="pt")}
