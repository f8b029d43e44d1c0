"""The embedded dataset: a small generated language whose questions need particular attention heads.

Every example is a question word and a sentence such as::

    agree? the quick fox near the lakes behind the barn indeed runs the basil softly

and is answered yes or no:

* ``agree?``: does the verb agree in number with the subject? (needs a head from the verb to its subject, across nouns)
* ``order?``: is the word right before ``indeed`` plural? (needs a head to the previous word)
* ``rare?``: does the sentence name a herb rather than a metal? (needs a head to the one rare word)

Gold dependency heads are kept with every example, for the analysis of head roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from training.config.data import Synthetic
from training.data.text import ClassificationData


def word_tokenizer(words: Sequence[str], *, max_length: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per word of a generated language, ``[CLS] words [SEP]``."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: index for index, word in enumerate([*specials, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=max_length,
    )  # fmt: skip


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
        self.heads = [other + (other >= at) for other in self.heads]
        self.words.insert(at, word)
        self.heads.insert(at, head)


def generate(rows: int, *, seed: int, max_distractors: int = 3) -> Dataset:
    """Generate examples; the three questions are equally frequent.

    Columns: ``text``, ``label`` (``yes`` or ``no``), ``question``, and ``heads``. The last has the index of each word's
    dependency head, -1 for the root and the question word.
    """
    random = np.random.default_rng(seed)
    questions = random.permutation([QUESTIONS[row % len(QUESTIONS)] for row in range(rows)])
    return Dataset.from_list([_example(random, str(question), max_distractors) for question in questions])


def counterpart(words: Sequence[str], question: str, heads: Sequence[int]) -> list[str]:
    """Return the example with one other word, so that the answer is the opposite.

    The subject or the word before ``indeed`` changes its number, or a herb and a metal change places.
    """
    place, other = _place_of_fact(words, question, heads), OTHER_NUMBER | OTHER_KIND
    return [*words[:place], other[words[place]], *words[place + 1 :]]


def _place_of_fact(words: Sequence[str], question: str, heads: Sequence[int]) -> int:
    if question == "order?":
        return words.index(MARKER) - 1
    if question == "rare?":
        return next(index for index, word in enumerate(words) if word in OTHER_KIND)
    verb = next(index for index, head in enumerate(heads) if head == -1 and index > 0)
    return next(index for index, head in enumerate(heads) if head == verb and words[index] in OTHER_NUMBER)


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
    """Return a tokenizer with one token per word of the language, ``[CLS] words [SEP]``."""
    words = [
        *QUESTIONS, "the", MARKER, *NOUNS, *map(plural, NOUNS), *VERBS, *map(singular_verb, VERBS),
        *ADJECTIVES, *ADVERBS, *PREPOSITIONS, *HERBS, *METALS,
    ]  # fmt: skip
    return word_tokenizer(words, max_length=64)


def generated(options: Any, make: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """Return the splits that options of generated data describe; ``make`` gets the number of rows and a seed for each."""
    splits = enumerate(options.rows.items())
    return {split: make(rows, seed=3 * options.text_seed + offset, **more) for offset, (split, rows) in splits}


class SyntheticData(ClassificationData):
    """The embedded offline dataset."""

    options: Synthetic

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return build_tokenizer()

    def load_splits(self) -> dict[str, Dataset]:
        return generated(self.options, generate, max_distractors=self.options.max_distractors)

    def counterparts(self, rows: int) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Tensor]]]:
        """Yield the question, examples outside all splits, and their counterparts (:func:`counterpart`).

        A batch has one question and one length; both parts have labels.
        """
        seed = 2**20 + self.options.text_seed  # beyond the seeds of the splits
        generated = generate(rows, seed=seed, max_distractors=self.options.max_distractors)

        def kind(row: dict[str, Any]) -> tuple[int, int]:
            return QUESTIONS.index(row["question"]), len(row["heads"])

        def encode(texts: list[str]) -> dict[str, Tensor]:
            tokenizer: Any = self.tokenizer
            return {**tokenizer(texts, return_tensors="pt")}

        for (question, _), group in groupby(sorted(generated.to_list(), key=kind), kind):
            members = list(group)
            others = [" ".join(counterpart(row["text"].split(), row["question"], row["heads"])) for row in members]
            labels = torch.tensor([self.labels.index(row["label"]) for row in members])
            texts = [row["text"] for row in members]
            yield QUESTIONS[question], {**encode(texts), "labels": labels}, {**encode(others), "labels": 1 - labels}
