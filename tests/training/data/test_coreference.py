"""Pronouns of GAP's table and of WinoBias's sentences."""

import pytest

from gates.errors import GateError
from tests.training.data.texts import write
from training.data.trees import GAP_COLUMNS, read_coreference

HEADER = "\t".join(["ID", *GAP_COLUMNS, "URL"])
TEXT = "Ann Lee met Bea's boss before she left."


def gap(a="TRUE", b="FALSE", *, pronoun=("she", 30), text=TEXT):
    return "\t".join(["x-1", text, pronoun[0], str(pronoun[1]), "Ann Lee", "0", a, "Bea", "12", b, "http://x"])


def pronouns(folder, *lines, name="pronouns.tsv"):
    return read_coreference(write(folder / name, "\n".join(lines) + "\n"))


def named(pronoun):
    return [[pronoun.words[word] for word in words] for words in ([pronoun.pronoun], pronoun.antecedent, pronoun.other)]


def test_gap(tmp_path):
    lines = [HEADER, gap(), gap("FALSE", "TRUE"), gap("TRUE", "TRUE"), gap("FALSE", "FALSE")]
    found = pronouns(tmp_path, *lines)
    assert [named(pronoun) for pronoun in found] == [
        [["she"], ["Ann", "Lee"], ["Bea"]], [["she"], ["Bea"], ["Ann", "Lee"]], [["she"], ["Ann", "Lee"], []],
    ]  # fmt: skip
    assert pronouns(tmp_path, *lines, name="pronouns.tsv.gz") == found


def test_winobias(tmp_path):
    lines = [
        "1 [The chief] hired the cook because [she] needed help.",
        "2 The cook met the [the chief] and asked [her] [himself].",
    ]
    assert [named(pronoun) for pronoun in pronouns(tmp_path, *lines)] == [
        [["she"], ["The", "chief"], []], [["her"], ["the", "chief"], []],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["some text"], "has neither the columns of GAP .* nor .brackets. as in WinoBias"),
        ([HEADER, gap(pronoun=("she", 29))], "line 2 of .* has Pronoun-offset '29', but 'she' is not there"),
        ([HEADER, gap(pronoun=("she", "x"))], "line 2 of .* has Pronoun-offset 'x'"),
        ([HEADER, gap("maybe")], "line 2 of .* has A-coref 'maybe'; expected TRUE or FALSE"),
        ([HEADER, "a\tb"], "line 2 of .* has 2 columns; expected 11"),
        ([HEADER, gap("FALSE", "FALSE")], "no pronoun in .* refers to a candidate"),
        (["1 [A] and [B] met."], "line 1 of .* has 2 mentions in brackets; expected an antecedent and its pronouns"),
        (["1 [The [chief]] met [her]."], "line 1 of .* has brackets that do not match"),
        (["1 The chief] met [her]."], "line 1 of .* has brackets that do not match"),
    ],
)
def test_what_is_neither_is_told_with_its_line(tmp_path, lines, message):
    with pytest.raises(GateError, match=message):
        pronouns(tmp_path, *lines)
