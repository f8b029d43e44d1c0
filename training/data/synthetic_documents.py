"""The embedded running text: small stories in a generated language, whose words follow from words far before them.

A document is about a few people, such as::

    Zamora Fox sees the old kings and he likes the tower . the kings near the lake hide the barn .
    so Kirin Clock finds Zamora Fox . Kirin Clock wants the poets and she sees the wolf .

Most words are chances, but some follow from what was said, so a language model needs heads that find it:

* *recall*: a name has another surname in every story, and the same one throughout it (the word behind an earlier mention of
  the name: induction);
* *agreement*: the verb takes the number of the subject, whatever nouns are between them;
* *pronouns*: ``he`` or ``she`` by the name that the sentence begins with.
"""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from training.config.data import SyntheticDocuments
from training.data.documents_base import TextBlocks
from training.data.subwords import of_words
from training.data.synthetic import ADJECTIVES, NOUNS, PREPOSITIONS, VERBS, plural, singular_verb
from training.data.synthetic_translation import NAMES

PEOPLE = (1, 3)
"""In a document, at least and at most."""
SENTENCES = (4, 8)
FIRST_NAMES = NAMES[:12]
SURNAMES = tuple(noun.capitalize() for noun in NOUNS)
AND, THEN, STOP = "and", "so", "."
PRONOUNS = ("he", "she")
PRONOUN = {name: PRONOUNS[index % 2] for index, name in enumerate(FIRST_NAMES)}


def generate_documents(rows: int, *, seed: int, max_distractors: int = 2) -> list[str]:
    """Stories as texts with spaces between all words.

    Args:
        rows: how many.
        seed: of all random choices.
        max_distractors: nouns between subject and verb, at most.
    """
    random = np.random.default_rng(seed)
    return [" ".join(_document(random, max_distractors)) for _ in range(rows)]


def _document(random: np.random.Generator, max_distractors: int) -> list[str]:
    people = random.integers(PEOPLE[0], PEOPLE[1] + 1)
    names, surnames = (random.choice(known, people, replace=False).tolist() for known in (FIRST_NAMES, SURNAMES))
    called = dict(zip(names, surnames, strict=True))
    words = []
    for _ in range(random.integers(SENTENCES[0], SENTENCES[1] + 1)):
        name, other = (str(random.choice(names)) for _ in range(2))
        first, second = (singular_verb(str(random.choice(VERBS))) for _ in range(2))
        match random.integers(0, 3):
            case 0:
                words += [THEN, name, called[name], first, other, called[other]]
            case 1:
                words += _sentence(random, max_distractors)
            case _:
                words += [name, called[name], first, *_noun_phrase(random)[0], AND]
                words += [PRONOUN[name], second, *_noun_phrase(random)[0]]
        words.append(STOP)
    return words


def _sentence(random: np.random.Generator, max_distractors: int) -> list[str]:
    """A subject with other nouns behind it, a verb that agrees with the subject, and an object."""
    words, is_plural = _noun_phrase(random)
    for _ in range(random.integers(0, max_distractors + 1)):
        words += [str(random.choice(PREPOSITIONS)), *_noun_phrase(random)[0]]
    verb = str(random.choice(VERBS))
    return [*words, verb if is_plural else singular_verb(verb), *_noun_phrase(random)[0]]


def _noun_phrase(random: np.random.Generator) -> tuple[list[str], bool]:
    """Its words, and whether it is plural."""
    noun, is_plural = str(random.choice(NOUNS)), bool(random.integers(0, 2))
    adjectives = [str(random.choice(ADJECTIVES))] if random.integers(0, 2) else []
    return ["the", *adjectives, plural(noun) if is_plural else noun], is_plural


def build_document_tokenizer() -> PreTrainedTokenizerBase:
    """One token per word of the language, ``words </s>``."""
    words = [
        "the", AND, THEN, STOP, *PRONOUNS, *NOUNS, *map(plural, NOUNS), *VERBS, *map(singular_verb, VERBS), *ADJECTIVES,
        *PREPOSITIONS, *FIRST_NAMES, *SURNAMES,
    ]  # fmt: skip
    return of_words(words, max_length=1024)


class SyntheticDocumentsData(TextBlocks):
    """The embedded offline text; the three splits are generated from different seeds.

    Args:
        options: what the data are told.
    """

    options: SyntheticDocuments

    def __init__(self, options: SyntheticDocuments) -> None:
        super().__init__(options)

    def load_documents(self) -> dict[str, list[str]]:
        return {
            split: generate_documents(
                rows, seed=3 * self.options.text_seed + offset, max_distractors=self.options.max_distractors
            )
            for offset, (split, rows) in enumerate(self.options.rows.items())
        }

    def load_tokenizer(self, backbone: str | None, texts: object) -> PreTrainedTokenizerBase:
        return build_document_tokenizer()
