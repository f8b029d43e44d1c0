"""The embedded language pair: a small generated language and its translation, which needs particular attention heads.

A source sentence and its translation, such as::

    the tall clock sees the kings behind the tall king
    bibo diloo lo bebi diloo lo mipo bebin loi budao

The translation is a function of the source, so a perfect translator reaches 100 BLEU. It needs

* *reordering*: the target has its verb at the end and its adverb at the beginning, adjectives and articles follow nouns;
* *agreement*: articles and adjectives take the gender and the number of their noun, the verb those of the subject, across
  the object and its phrases;
* a *lexicon*: names are translated one by one, and most of them are rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from transformers import PreTrainedTokenizerBase

from training.config.data import SyntheticTranslation
from training.data.subwords import of_words
from training.data.synthetic import ADJECTIVES, ADVERBS, NOUNS, PREPOSITIONS, VERBS, plural, singular_verb
from training.data.translation import Pairs, TranslationData

BEGINNINGS, ENDS = ("Za", "Ki", "Mo", "Te", "Lu", "Ba", "Re", "No"), ("mora", "rin", "vel", "dash", "tok")
NAMES = tuple(f"{beginning}{end}" for beginning, end in product(BEGINNINGS, ENDS))
GENDERS = 3
ENDINGS = tuple(product(range(GENDERS), (False, True)))
"""Gender and number; the ending of what agrees is its place here."""
ARTICLE = "the"


def _stems(count: int, consonants: str, vowels: str) -> list[str]:
    """Invented words of two syllables, all different."""
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
    """Sentences and their translations.

    Args:
        rows: how many pairs.
        seed: of all random choices.
        max_modifiers: phrases behind the subject and behind the object, at most.
    """
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
    """A noun phrase with phrases behind it; these come before it in the target."""
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
    """One token per word of both languages, ``words </s>``."""
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
    """The embedded offline language pair; the three splits are generated from different seeds.

    Args:
        options: what the data are told.
    """

    options: SyntheticTranslation

    def __init__(self, options: SyntheticTranslation) -> None:
        super().__init__(options)

    def load_pairs(self) -> dict[str, Pairs]:
        return {
            split: generate_pairs(rows, seed=3 * self.options.text_seed + offset, max_modifiers=self.options.max_modifiers)
            for offset, (split, rows) in enumerate(self.options.rows.items())
        }

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return build_pair_tokenizer()
