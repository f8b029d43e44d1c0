"""Examples of a program's question, for models whose necessary heads are known."""

from __future__ import annotations

import random
from functools import partial

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from gates.errors import GateError
from training.config.data import KnownTruth
from training.data.synthetic import generated, word_tokenizer
from training.data.text import ClassificationData
from training.tasks.classification import KnownAnswer
from training.truth.program import PROGRAMS, Program


def generate(program: Program, rows: int, *, seed: int) -> Dataset:
    """Generate strings with answers, half of them yes, in columns ``text`` (letters between spaces) and ``label``."""
    chance = random.Random(seed)
    texts = [program.draw(chance, bool(row % 2)) for row in range(rows)]
    labels = ["yes" if program.answer(text) else "no" for text in texts]
    return Dataset.from_dict({"text": [" ".join(text) for text in texts], "label": labels})


def build_tokenizer(program: Program) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per letter, ``[CLS] letters [SEP]``."""
    return word_tokenizer(program.letters, max_length=program.places)


class KnownTruthData(ClassificationData):
    """The strings of one program."""

    options: KnownTruth

    def __init__(self, options: KnownTruth) -> None:
        super().__init__(options)
        if options.parts:
            raise GateError(
                "--data.program is all, but a run has one model; give one of the programs "
                f"({', '.join(PROGRAMS)}), or use the command compare"
            )
        self.program = PROGRAMS[options.program]

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return build_tokenizer(self.program)

    def load_splits(self) -> dict[str, Dataset]:
        return generated(self.options, partial(generate, self.program))

    @property
    def task(self) -> KnownAnswer:
        return KnownAnswer(self.labels, program=self.options.program)
