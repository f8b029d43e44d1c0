"""The embedded running text: small stories in a generated language with dependencies between distant words.

A document is about a few people, such as::

    Zamora Fox sees the king and he likes the tower . the kings near the lake hide Zamora Fox .

Most words are random, but some follow from earlier words, so a language model needs heads that find these:

* *recall*: a name has one surname in a story, and another in the next (induction: the word after an earlier mention);
* *agreement*: the verb takes the number of the subject, across the nouns between them;
* *pronouns*: ``he`` or ``she``, by the name at the beginning of the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from transformers import PreTrainedTokenizerBase

from training.config.text import SyntheticDocuments, SyntheticTranslation
from training.data.documents import TextBlocks
from training.data.synthetic import ADJECTIVES, ADVERBS, NOUNS, PREPOSITIONS, VERBS, generated, plural, singular_verb
from training.data.translation import Pairs, TranslationData, of_words

# The embedded language pair: a small generated language and its translation, which needs particular attention heads.
#
# A source sentence and its translation, such as::
#
#     the tall clock sees the kings behind the tall king
#     bibo diloo lo bebi diloo lo mipo bebin loi budao
#
# The translation is a function of the source, so a perfect translator reaches 100 BLEU. It needs
#
# * *reordering*: the target has its verb at the end and its adverb at the beginning, adjectives and articles follow nouns;
# * *agreement*: articles and adjectives take the gender and number of their noun, the verb those of the distant subject;
# * a *lexicon*: each name has its own translation, and most names are rare.

BEGINNINGS, ENDS = ("Za", "Ki", "Mo", "Te", "Lu", "Ba", "Re", "No"), ("mora", "rin", "vel", "dash", "tok")
NAMES = tuple(f"{beginning}{end}" for beginning, end in product(BEGINNINGS, ENDS))
GENDERS = 3
ENDINGS = tuple(product(range(GENDERS), (False, True)))
"""Gender and number of a noun; :data:`SUFFIXES` are in this order."""
ARTICLE = "the"


def _stems(count: int, consonants: str, vowels: str) -> list[str]:
    """Return invented words of two syllables, all different."""
    syllables = [consonant + vowel for consonant in consonants for vowel in vowels]
    words = [first + second for first, second in product(syllables, syllables) if first != second]
    return words[:: len(syllables) // 3][:count]  # strides, so that neighbours differ in both syllables


SUFFIXES = dict(zip(ENDINGS, ("o", "oi", "a", "ai", "u", "ui"), strict=True))
INFLECTED = (*NOUNS, *VERBS, *ADJECTIVES)
LEXICON = dict(zip(INFLECTED, _stems(len(INFLECTED), "bdfgkl", "aeiou"), strict=True))
PARTICLES = dict(zip((*ADVERBS, *PREPOSITIONS), _stems(len(ADVERBS) + len(PREPOSITIONS), "mnprst", "aeiou"), strict=True))
NAMED = dict(zip(NAMES, (stem.capitalize() for stem in _stems(len(NAMES), "vzjhw", "aeiou")), strict=True))
GENDER = {noun: index % GENDERS for index, noun in enumerate((*NOUNS, *NAMES))}


@dataclass(frozen=True)
class _Phrase:
    """A noun phrase in both languages, with what agrees with it."""

    source: list[str]
    target: list[str]
    gender: int
    is_plural: bool


def generate_pairs(rows: int, *, seed: int, max_modifiers: int = 1) -> Pairs:
    """Generate sentences with up to ``max_modifiers`` phrases after subject and object, and their translations."""
    random = np.random.default_rng(seed)
    pairs = [_pair(random, max_modifiers) for _ in range(rows)]
    return Pairs([source for source, _ in pairs], [target for _, target in pairs])


def _pair(random: np.random.Generator, max_modifiers: int) -> tuple[str, str]:
    subject, thing = (_modified(random, max_modifiers) for _ in range(2))
    verb = str(random.choice(VERBS))
    adverb = [str(random.choice(ADVERBS))] if random.integers(0, 2) else []
    source = [*subject.source, verb if subject.is_plural else singular_verb(verb), *thing.source, *adverb]
    agreeing = LEXICON[verb] + SUFFIXES[subject.gender, subject.is_plural]
    target = [*(PARTICLES[word] for word in adverb), *subject.target, *thing.target, agreeing]
    return " ".join(source), " ".join(target)


def _modified(random: np.random.Generator, max_modifiers: int) -> _Phrase:
    """Return a noun phrase with phrases after it; these come before it in the target."""
    phrase = _noun_phrase(random)
    source, target = list(phrase.source), list(phrase.target)
    for _ in range(random.integers(0, max_modifiers + 1)):
        preposition, other = str(random.choice(PREPOSITIONS)), _noun_phrase(random)
        source += [preposition, *other.source]
        target = [*other.target, PARTICLES[preposition], *target]
    return _Phrase(source, target, phrase.gender, phrase.is_plural)


def _noun_phrase(random: np.random.Generator) -> _Phrase:
    if random.random() < 0.3:  # a name; the k-th is about k times rarer than the first
        weights = 1 / np.arange(1, len(NAMES) + 1)
        name = NAMES[random.choice(len(NAMES), p=weights / weights.sum())]
        return _Phrase([name], [NAMED[name]], GENDER[name], False)
    noun, is_plural = str(random.choice(NOUNS)), bool(random.integers(0, 2))
    adjectives = [str(random.choice(ADJECTIVES))] if random.integers(0, 2) else []
    suffix = SUFFIXES[GENDER[noun], is_plural]
    return _Phrase(
        [ARTICLE, *adjectives, plural(noun) if is_plural else noun],
        [LEXICON[noun] + ("n" if is_plural else ""), *(LEXICON[word] + suffix for word in adjectives), "l" + suffix],
        GENDER[noun],
        is_plural,
    )


def build_pair_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per word of both languages, ``words </s>``."""
    source = [
        ARTICLE, *NOUNS, *map(plural, NOUNS), *VERBS, *map(singular_verb, VERBS), *ADJECTIVES, *ADVERBS, *PREPOSITIONS, *NAMES,
    ]  # fmt: skip
    target = [
        *("l" + suffix for suffix in SUFFIXES.values()),
        *(LEXICON[noun] + ending for noun in NOUNS for ending in ("", "n")),
        *(LEXICON[word] + suffix for word in (*VERBS, *ADJECTIVES) for suffix in SUFFIXES.values()),
        *PARTICLES.values(),
        *NAMED.values(),
    ]
    return of_words([*source, *target], max_length=64)


class SyntheticTranslationData(TranslationData):
    """The embedded offline language pair."""

    options: SyntheticTranslation

    def load_pairs(self) -> dict[str, Pairs]:
        return generated(self.options, generate_pairs, max_modifiers=self.options.max_modifiers)

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return build_pair_tokenizer()


FIRST_NAMES = NAMES[:12]
SURNAMES = tuple(noun.capitalize() for noun in NOUNS)
AND, THEN, STOP = "and", "so", "."
PRONOUNS = ("he", "she")
PRONOUN = {name: PRONOUNS[index % 2] for index, name in enumerate(FIRST_NAMES)}


def generate_documents(rows: int, *, seed: int, max_distractors: int = 2) -> list[str]:
    """Generate stories as texts with spaces between all words; ``max_distractors`` is the most nouns before a verb."""
    random = np.random.default_rng(seed)
    return [" ".join(_document(random, max_distractors)) for _ in range(rows)]


def _document(random: np.random.Generator, max_distractors: int) -> list[str]:
    people = random.integers(1, 4)
    names, surnames = (random.choice(known, people, replace=False).tolist() for known in (FIRST_NAMES, SURNAMES))
    called = dict(zip(names, surnames, strict=True))
    words = []
    for _ in range(random.integers(4, 9)):
        name, other = (str(random.choice(names)) for _ in range(2))
        first, second = (singular_verb(str(random.choice(VERBS))) for _ in range(2))
        match random.integers(0, 3):
            case 0:
                words += [THEN, name, called[name], first, other, called[other]]
            case 1:
                words += _sentence(random, max_distractors)
            case _:
                words += [name, called[name], first, *_document_noun_phrase(random)[0], AND]
                words += [PRONOUN[name], second, *_document_noun_phrase(random)[0]]
        words.append(STOP)
    return words


def _sentence(random: np.random.Generator, max_distractors: int) -> list[str]:
    """Return a subject with other nouns after it, a verb that agrees with the subject, and an object."""
    words, is_plural = _document_noun_phrase(random)
    for _ in range(random.integers(0, max_distractors + 1)):
        words += [str(random.choice(PREPOSITIONS)), *_document_noun_phrase(random)[0]]
    verb = str(random.choice(VERBS))
    return [*words, verb if is_plural else singular_verb(verb), *_document_noun_phrase(random)[0]]


def _document_noun_phrase(random: np.random.Generator) -> tuple[list[str], bool]:
    """Return the words of a noun phrase, and whether it is plural."""
    noun, is_plural = str(random.choice(NOUNS)), bool(random.integers(0, 2))
    adjectives = [str(random.choice(ADJECTIVES))] if random.integers(0, 2) else []
    return ["the", *adjectives, plural(noun) if is_plural else noun], is_plural


def build_document_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per word of the language, ``words </s>``."""
    words = [
        "the", AND, THEN, STOP, *PRONOUNS, *NOUNS, *map(plural, NOUNS), *VERBS, *map(singular_verb, VERBS), *ADJECTIVES,
        *PREPOSITIONS, *FIRST_NAMES, *SURNAMES,
    ]  # fmt: skip
    return of_words(words, max_length=1024)


class SyntheticDocumentsData(TextBlocks):
    """The embedded offline text."""

    options: SyntheticDocuments

    def load_documents(self) -> dict[str, list[str]]:
        return generated(self.options, generate_documents, max_distractors=self.options.max_distractors)

    def load_tokenizer(self, backbone: str | None, texts: object) -> PreTrainedTokenizerBase:
        return build_document_tokenizer()
