"""Pronouns and what they stand for, from GAP (Webster et al. 2018) and WinoBias (Zhao et al. 2018)."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gates.errors import GateError
from training.data.files import check_text, check_there

WORD = re.compile(r"\w+|[^\w\s]")
GAP_COLUMNS = (
    "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref",
)  # fmt: skip
TRUTH = {"TRUE": True, "FALSE": False}
PRONOUNS = {
    "he", "him", "his", "himself", "she", "her", "hers", "herself", "they", "them", "their", "theirs", "themselves",
    "it", "its", "itself",
}  # fmt: skip


@dataclass(frozen=True)
class Pronoun:
    """A pronoun in a text, with its antecedent and perhaps another candidate.

    Args:
        words: of the text.
        pronoun: number of the word.
        antecedent: numbers of the mention's words.
        other: those of the candidate that it does not stand for; none if there is no other.
    """

    words: list[str]
    pronoun: int
    antecedent: list[int]
    other: list[int]


def read_coreference(file: str) -> list[Pronoun]:
    """The pronouns of a GAP table or of WinoBias sentences with brackets around pronoun and antecedent, also with ``.gz``.

    Pronouns of GAP that stand for neither candidate are passed over.

    Raises:
        GateError: for a file that is missing, empty or neither, with the line.
    """
    check_there(file, "coreference")
    check_text(Path(file), "text")
    opener = gzip.open if file.endswith(".gz") else open
    with opener(file, "rt", encoding="utf-8-sig", newline="\n") as stream:
        lines = [line.rstrip("\r\n") for line in stream]
    header = lines[0].split("\t")
    if set(GAP_COLUMNS) <= set(header):
        rows = list(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE))
        found = [_of_gap(file, number, header, row) for number, row in enumerate(rows, start=2) if row]
    elif "[" in lines[0] and "]" in lines[0]:
        found = [_of_brackets(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    else:
        raise GateError(
            f"{file!r} is neither GAP's table, with the columns {', '.join(GAP_COLUMNS)}, nor WinoBias's sentences with "
            "[brackets]"
        )
    known = [pronoun for pronoun in found if pronoun is not None]
    if not known:
        raise GateError(f"no pronoun in {file!r} stands for a candidate; expected some that do")
    return known


def _of_gap(file: str, line: int, header: Sequence[str], row: Sequence[str]) -> Pronoun | None:
    where = f"line {line} of {file!r}"
    if len(row) != len(header):
        raise GateError(f"{where} has {len(row)} columns; expected {len(header)}, as in the header")
    cells = dict(zip(header, row, strict=True))
    spans = {name: _span(where, cells, name) for name in ("Pronoun", "A", "B")}
    for name in ("A-coref", "B-coref"):
        if cells[name].upper() not in TRUTH:
            raise GateError(f"{where} has {name} {cells[name]!r}; expected TRUE or FALSE")
    candidates = {name: TRUTH[cells[f"{name}-coref"].upper()] for name in ("A", "B")}
    if not any(candidates.values()):
        return None
    right = "A" if candidates["A"] else "B"
    wrong = None if all(candidates.values()) else ("B" if right == "A" else "A")
    return _pronoun(cells["Text"], spans["Pronoun"], spans[right], spans[wrong] if wrong else None)


def _span(where: str, cells: dict[str, str], name: str) -> tuple[int, int]:
    """First and last character of a mention, checked against the text."""
    text, mention, offset = cells["Text"], cells[name], cells[f"{name}-offset"]
    if not offset.isdecimal() or text[int(offset) : int(offset) + len(mention)] != mention or not mention:
        raise GateError(
            f"{where} has {name}-offset {offset!r}, where {mention!r} is not in the text; expected its first character"
        )
    return int(offset), int(offset) + len(mention)


def _of_brackets(file: str, line: int, text: str) -> Pronoun:
    """A sentence of WinoBias; of several pronouns in brackets the first counts."""
    where = f"line {line} of {file!r}"
    spans: list[tuple[int, int]] = []
    plain, opened = "", None
    for character in re.sub(r"^\d+\s+", "", text):
        if character == "[":
            if opened is not None:
                raise GateError(
                    f"{where} has a bracket within a bracket; expected an antecedent and its pronouns in brackets each"
                )
            opened = len(plain)
        elif character == "]":
            if opened is None:
                raise GateError(
                    f"{where} closes a bracket that is not open; expected an antecedent and its pronouns in brackets each"
                )
            spans.append((opened, len(plain)))
            opened = None
        else:
            plain += character
    pronouns = [span for span in spans if plain[slice(*span)].lower() in PRONOUNS]
    others = [span for span in spans if span not in pronouns]
    if len(others) != 1 or not pronouns:
        raise GateError(f"{where} has {len(spans)} mentions in brackets; expected an antecedent and its pronouns")
    return _pronoun(plain, pronouns[0], others[0], None)


def _pronoun(text: str, pronoun: tuple[int, int], antecedent: tuple[int, int], other: tuple[int, int] | None) -> Pronoun:
    found = list(WORD.finditer(text))

    def words_in(span: tuple[int, int] | None) -> list[int]:
        return [] if span is None else [i for i, word in enumerate(found) if word.start() < span[1] and word.end() > span[0]]

    return Pronoun([word.group() for word in found], words_in(pronoun)[0], words_in(antecedent), words_in(other))
