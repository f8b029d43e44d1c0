"""Examples of a program's question, for models whose necessary heads are known."""

from __future__ import annotations

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gates.errors import GateError
from training.config.data import KnownTruth
from training.data.classification import ClassificationData
from training.tasks.known_truth import KnownAnswer
from training.truth.program import Program
from training.truth.programs import PROGRAMS


def generate(program: Program, rows: int, *, seed: int) -> Dataset:
    """Strings with their answers, as many yes as no, as columns ``text`` (letters with spaces between) and ``label``."""
    chance = random.Random(seed)
    texts = [program.draw(chance, bool(row % 2)) for row in range(rows)]
    labels = ["yes" if program.answer(text) else "no" for text in texts]
    return Dataset.from_dict({"text": [" ".join(text) for text in texts], "label": labels})


def build_tokenizer(program: Program) -> PreTrainedTokenizerBase:
    """One token per letter, ``[CLS] letters [SEP]``."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: index for index, token in enumerate([*specials, *program.letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=program.places,
    )  # fmt: skip


class KnownTruthData(ClassificationData):
    """The strings of one program; the three splits are generated from different seeds.

    Args:
        options: what the data are told.
    """

    options: KnownTruth

    def __init__(self, options: KnownTruth) -> None:
        super().__init__(options)
        if options.parts:
            raise GateError(
                "--data.program is all, but a run has one model; name one of the programs "
                f"({', '.join(PROGRAMS)}), or use the command compare"
            )
        self.program = PROGRAMS[options.program]

    def load_tokenizer(self, backbone: str | None) -> PreTrainedTokenizerBase:
        return build_tokenizer(self.program)

    def load_splits(self) -> dict[str, Dataset]:
        return {
            split: generate(self.program, rows, seed=3 * self.options.text_seed + offset)
            for offset, (split, rows) in enumerate(self.options.rows.items())
        }

    @property
    def task(self) -> KnownAnswer:
        return KnownAnswer(self.labels, program=self.options.program)
