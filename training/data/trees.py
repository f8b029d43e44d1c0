"""Gold trees from a treebank in CoNLL-U, the format of Universal Dependencies."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import conllu
from conllu.exceptions import ParseException

from gates.errors import GateError, first_line
from training.data import translation as parallel_text
from training.data.files import check_text, check_there, open_text
from training.data.tagged_files import Block, conllu_fields, sentence_blocks
from training.runs.own_code import own_function

UNCOUNTED = ("root", "punct", "dep", "list", "parataxis", "orphan", "goeswith", "reparandum")
"""Relations that are analysed only by name: Universal Dependencies' groups loose, special and other, with their subtypes.

They hold the items of a list or the parts of a broken word together.
"""


@dataclass(frozen=True)
class Tree:
    """A sentence with its basic dependencies.

    Args:
        heads: The head of each word, by number from 0; -1 for the root.
        relations: The relation of each word to its head, subtypes included, such as ``nsubj:pass``.
    """

    words: list[str]
    heads: list[int]
    relations: list[str]


def read_treebank(file: str) -> list[Tree]:
    """Read the sentences of a CoNLL-U file, also with ``.gz``.

    A token of several words, such as German *zum*, counts as these words, because the trees refer to them. Empty nodes and
    enhanced dependencies are skipped.
    """
    check_there(file, "treebank")
    check_text(file)
    with open_text(file) as stream:
        trees = trees_in(stream, repr(file))
    if not trees:
        raise GateError(f"the treebank {file!r} has no sentence; expected CoNLL-U, ten columns with tabs between them")
    return trees


def trees_in(lines: Iterable[str], where: str) -> list[Tree]:
    """Return the sentences in lines of CoNLL-U; see :func:`read_treebank`."""
    blocks = ([(number, line) for number, line in block if not line.startswith("#")] for block in sentence_blocks(lines))
    return [_tree(where, block) for block in blocks if block]


def relations_of(trees: Sequence[Tree], wanted: Sequence[str] = ()) -> list[str]:
    """Return the wanted relations, or all that count, the most frequent first."""
    counts = Counter(relation for tree in trees for relation in tree.relations)
    for relation in wanted:
        if relation not in counts:
            raise GateError(f"the treebank has no relation {relation!r}; it has {', '.join(sorted(counts)) or 'none'}")
    usual = [relation for relation, _ in counts.most_common() if relation.partition(":")[0] not in UNCOUNTED]
    return list(wanted) or usual


def _tree(place: str, block: Block) -> Tree:
    words: list[str] = []
    heads: list[int] = []
    relations: list[str] = []
    lines: list[int] = []
    for number, text in block:
        where = f"line {number} of {place}"
        fields = conllu_fields(text, where)
        try:
            token = conllu.parse("\t".join([*fields[:8], "_", "_"]) + "\n")[0][0]
        except (ParseException, IndexError, ValueError) as error:
            raise GateError(f"{where} is not CoNLL-U: {' '.join(str(error).split())}") from error
        if not isinstance(token["id"], int):  # a token of several words, or an empty node
            continue
        if token["id"] != len(words) + 1:
            raise GateError(f"{where} has the ID {token['id']}; expected {len(words) + 1}, because words count from 1")
        if not fields[1].strip():
            raise GateError(f"{where} has no word in its second column; expected one, or _ for an unknown word")
        if token["head"] is None or not token["deprel"] or token["deprel"] == "_":
            raise GateError(f"{where} has no head or relation; expected a treebank with dependencies")
        words.append(fields[1])
        heads.append(token["head"] - 1)
        relations.append(token["deprel"])
        lines.append(number)
    _check_tree(place, block[0][0], heads, lines)
    return Tree(words, heads, relations)


def _check_tree(where: str, first: int, heads: Sequence[int], lines: Sequence[int]) -> None:
    if not heads:
        raise GateError(f"the sentence at line {first} of {where} has no words; expected a line for each word")
    for head, line in zip(heads, lines, strict=True):
        if not -1 <= head < len(heads):
            raise GateError(f"line {line} of {where} has the head {head + 1}; expected 0 to {len(heads)}")
    if -1 not in heads:
        raise GateError(f"the sentence at line {first} of {where} has no root; expected a word whose head is 0")
    for word, line in enumerate(lines):
        place, steps = word, 0
        while place >= 0 and steps <= len(heads):
            place, steps = heads[place], steps + 1
        if place >= 0:
            raise GateError(f"line {line} of {where} leads to a cycle of heads; expected a tree up to the root")


# Pronouns and their antecedents, from GAP (Webster et al. 2018) and WinoBias (Zhao et al. 2018).

WORD = re.compile(r"\w+|[^\w\s]")
MENTION = re.compile(r"(\[[^\[\]]*\])")
GAP_COLUMNS = (
    "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref",
)  # fmt: skip
PRONOUNS = {
    "he", "him", "his", "himself", "she", "her", "hers", "herself", "they", "them", "their", "theirs", "themselves",
    "it", "its", "itself",
}  # fmt: skip


@dataclass(frozen=True)
class Pronoun:
    """A pronoun in a text, with its antecedent and perhaps a wrong candidate, all as numbers of words."""

    words: list[str]
    pronoun: int
    antecedent: list[int]
    other: list[int]


def read_coreference(file: str) -> list[Pronoun]:
    """Read the pronouns of a GAP table, or of WinoBias sentences with brackets around pronoun and antecedent, also ``.gz``.

    Pronouns of GAP that refer to neither candidate are skipped.
    """
    check_there(file, "coreference")
    check_text(file)
    with open_text(file) as stream:
        lines = [line.rstrip("\r\n") for line in stream]
    header = lines[0].split("\t")
    if set(GAP_COLUMNS) <= set(header):
        rows = list(csv.reader(lines[1:], delimiter="\t", quoting=csv.QUOTE_NONE))
        found = [_of_gap(file, number, header, row) for number, row in enumerate(rows, start=2) if row]
    elif "[" in lines[0] and "]" in lines[0]:
        found = [_of_brackets(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    else:
        raise GateError(
            f"{file!r} has neither the columns of GAP ({', '.join(GAP_COLUMNS)}) nor [brackets] as in WinoBias; give one of "
            "these formats"
        )
    known = [pronoun for pronoun in found if pronoun is not None]
    if not known:
        raise GateError(f"no pronoun in {file!r} refers to a candidate; expected at least one")
    return known


def _of_gap(file: str, line: int, header: Sequence[str], row: Sequence[str]) -> Pronoun | None:
    where = f"line {line} of {file!r}"
    if len(row) != len(header):
        raise GateError(f"{where} has {len(row)} columns; expected {len(header)}, as in the header")
    cells = dict(zip(header, row, strict=True))
    spans = {name: _span(where, cells, name) for name in ("Pronoun", "A", "B")}
    for name in ("A-coref", "B-coref"):
        if cells[name].upper() not in ("TRUE", "FALSE"):
            raise GateError(f"{where} has {name} {cells[name]!r}; expected TRUE or FALSE")
    right = [name for name in ("A", "B") if cells[f"{name}-coref"].upper() == "TRUE"]
    if not right:
        return None
    wrong = [name for name in ("A", "B") if name not in right]
    return _pronoun(cells["Text"], spans["Pronoun"], spans[right[0]], spans[wrong[0]] if wrong else None)


def _span(where: str, cells: dict[str, str], name: str) -> tuple[int, int]:
    """Return the first and last character of a mention, checked against the text."""
    text, mention, offset = cells["Text"], cells[name], cells[f"{name}-offset"]
    if not offset.isdecimal() or text[int(offset) : int(offset) + len(mention)] != mention or not mention:
        raise GateError(f"{where} has {name}-offset {offset!r}, but {mention!r} is not there; expected its first character")
    return int(offset), int(offset) + len(mention)


def _of_brackets(file: str, line: int, text: str) -> Pronoun:
    """Read a sentence of WinoBias; the first pronoun in brackets counts."""
    where, text = f"line {line} of {file!r}", re.sub(r"^\d+\s+", "", text)
    if re.search(r"[\[\]]", MENTION.sub("", text)):
        raise GateError(f"{where} has brackets that do not match; expected an antecedent and its pronouns, each in brackets")
    plain, spans = "", []
    for part in MENTION.split(text):
        if part.startswith("["):
            part = part[1:-1]
            spans.append((len(plain), len(plain) + len(part)))
        plain += part
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


# Trees of raw texts: from a pipeline of spaCy (an optional extra), or from the user's parser that writes CoNLL-U.


def parse_texts(parser: str, texts: Sequence[str]) -> list[Tree]:
    """Return the sentences of some texts with trees that are predicted, not gold.

    Args:
        parser: The name or folder of an installed pipeline of spaCy, or a ``module:function`` of the user. The function takes
            the list of texts and returns their trees as one text in CoNLL-U.
    """
    trees = _own_trees(parser, texts) if ":" in parser else _spacy_trees(parser, texts)
    if not trees:
        raise GateError(f"the parser {parser!r} found no sentence; give texts in its language")
    return trees


def _own_trees(parser: str, texts: Sequence[str]) -> list[Tree]:
    function = own_function(parser, "parser", "the list of texts")
    try:
        found = function(list(texts))
    except Exception as error:
        raise GateError(f"the parser {parser!r} failed: {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(found, str):
        raise GateError(f"the parser {parser!r} returned {type(found).__name__}; expected its trees as one text in CoNLL-U")
    return trees_in(found.splitlines(), f"the output of the parser {parser!r}")


def _spacy_trees(parser: str, texts: Sequence[str]) -> list[Tree]:
    try:
        import spacy
    except ImportError as error:
        raise GateError(
            f"the parser {parser!r} needs spaCy, which is not installed; run pip install spacy, or give --conllu FILE"
        ) from error
    try:
        pipeline = spacy.load(parser)
    except OSError as error:
        raise GateError(
            f"spaCy has no pipeline {parser!r} here; run for example python -m spacy download en_core_web_sm, or give the "
            "folder of a pipeline"
        ) from error
    except (ValueError, ImportError) as error:
        raise GateError(
            f"the pipeline {parser!r} cannot be loaded by spaCy {spacy.__version__} ({first_line(error)}); install a pipeline "
            "of this version"
        ) from error
    trees = []
    for document in pipeline.pipe(texts):
        if not document.has_annotation("DEP"):
            raise GateError(f"the pipeline {parser!r} has no parser; give one with a parser, such as en_core_web_sm")
        trees += [tree for sentence in document.sents if (tree := _parsed_tree(sentence)).words]
    return trees


def _parsed_tree(sentence: Any) -> Tree:
    """Return a sentence of spaCy without its tokens of white space. A word below such a token gets that token's head."""
    kept = [token for token in sentence if not token.is_space]
    numbers = {token.i: number for number, token in enumerate(kept)}

    def head_of(token: Any) -> int:
        head = token.head
        while head.is_space and head.head.i != head.i:
            head = head.head
        return -1 if head.i == token.i else numbers.get(head.i, -1)

    heads = [head_of(token) for token in kept]
    relations = ["root" if head < 0 else token.dep_ for token, head in zip(kept, heads, strict=True)]
    return Tree([token.text for token in kept], heads, relations)


def read_lines(file: str) -> list[str]:
    """Read the lines of a UTF-8 text file that are not blank, also with ``.gz``."""
    return [line for line in parallel_text.read_lines(file, "text") if line]
