"""Strings and answers, by rules written again here."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from training.truth.program import PROGRAMS


def jumps(text, count):
    place = 0
    for _ in range(count):
        place = int(text[place]) - 1
    return place < 4


def recalled(text):
    (before,) = [place for place in range(len(text) - 1) if text[place] == text[-1]]
    return text[before + 1] < "d"


ANSWERS = {
    "has": lambda text: Counter(text)["a"] > 0,
    "majority": lambda text: sorted(text)[len(text) // 2] == "a",
    "same-ends": lambda text: text.startswith(text[-1]),
    "bigram": lambda text: ("a", "b") in set(pairwise(text)),
    "palindrome": lambda text: all(text[place] == text[-1 - place] for place in range(4)),
    "induction": recalled,
    "jumps-4": lambda text: jumps(text, 4),
    "jumps-8": lambda text: jumps(text, 8),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_answers_follow_from_the_strings_and_are_as_asked_for(name):
    program, chance = PROGRAMS[name], random.Random(0)
    base = next(base for base in ANSWERS if name in (base, f"{base}-copies", f"{base}-backup", f"{base}-undone"))
    for yes in [True, False] * 50:
        text = program.draw(chance, yes)
        assert len(text) == program.length
        assert set(text) <= set(program.letters)
        assert program.answer(text) == ANSWERS[base](text) == yes


def test_there_are_programs_of_one_to_eight_layers_with_all_that_makes_it_hard():
    depths = {len(program.layers) for program in PROGRAMS.values()}
    assert {1, 2, 3, 4, 8} <= depths
    heads = {name: Counter(head.does for layer in program.layers for head in layer.heads) for name, program in PROGRAMS.items()}
    assert sum(any(count[needed] > 1 for needed in PROGRAMS[name].needed) for name, count in heads.items()) >= 4
    assert any(set(count) - set(PROGRAMS[name].needed) for name, count in heads.items())  # a second program
    assert any(program.cancelling for program in PROGRAMS.values())


def test_the_page_describes_every_program():
    page = (Path(__file__).parents[3] / "docs" / "explanation" / "known_truth.md").read_text(encoding="utf-8")
    for one in PROGRAMS.values():
        numbers = f"{len(one.layers)} | {one.total_heads} | {len(one.needed)}"
        assert f"| `{one.name}` | {one.question} | {numbers} | {one.hard} |" in page
