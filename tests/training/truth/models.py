"""Compiled models with examples of their question."""

import random
from functools import cache

import torch

from gates.gating.head_gates import HeadGates
from training.truth.compiler import compiled
from training.truth.program import PROGRAMS

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


@cache
def questions(name, rows=128):
    """Token ids ``[rows, places]`` and answers ``[rows]``."""
    program, chance = PROGRAMS[name], random.Random(0)
    texts = [program.draw(chance, bool(row % 2)) for row in range(rows)]
    ids = torch.tensor([[2, *(len(SPECIALS) + program.letters.index(letter) for letter in text), 3] for text in texts])
    return ids, torch.tensor([int(program.answer(text)) for text in texts])


class ScoringContext:
    """A compiled model with gates on it."""

    def __init__(self, name, seed=0):
        self.program = program = PROGRAMS[name]
        torch.manual_seed(seed)
        vocabulary = {token: index for index, token in enumerate([*SPECIALS, *program.letters])}
        self.model = compiled(program, vocabulary=vocabulary, labels={"no": 0, "yes": 1}).eval()
        self.gates = HeadGates(self.model)
        self.gates.attach()
        self.functions = [
            [layer * program.heads + head for layer, head in heads] for heads in self.model.config.necessary_heads
        ]
        self.ids, self.answers = questions(name)

    @torch.no_grad()
    def accuracy(self, *, kept=None, closed=()):
        """With these heads alone, or with all but these."""
        mask = torch.ones(self.gates.size) if kept is None else torch.zeros(self.gates.size)
        mask[list(kept or ())] = 1
        mask[list(closed)] = 0
        self.gates.set_mask_(mask)
        return float((self.model(self.ids).logits.argmax(-1) == self.answers).float().mean())
