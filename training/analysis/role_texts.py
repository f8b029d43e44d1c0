"""What roles are measured on: trees, pronouns, pairs and repeated sequences, as batches of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gates.errors import GateError
from gates.roles.coreference import Mentions
from gates.roles.induction import LENGTHS, repeated_sequences
from gates.roles.syntactic import Trees
from training.analysis.observed import ObservedModel
from training.data.coreference import Pronoun, read_coreference
from training.data.parsed_text import parse_texts
from training.data.text_lines import read_lines
from training.data.treebank import Tree, read_treebank, relations_of
from training.data.words import Pieces, encode_words
from training.stats.numbers import counted

BATCH, CELLS = 32, 32 * 48**2
"""Sentences at a time, and the most pairs of their tokens: less for sentences of more than 48 tokens."""
MULTIPLE = 8
"""Of tokens, to which batches are filled up: a CPU keeps something for every new width, which would grow with the data."""
REPEATED = 200
"""Random sequences that are said twice."""
MOST_PAIRS = 1000
"""Of a translator's test pairs."""
MOST_SHOWN, LONGEST_SHOWN = 20, 64
"""Sentences, and tokens of each, whose attention is shown: a page holds all heads of them."""
LEAST_KINDS = 16
"""Of tokens, from which random sequences are drawn."""


@dataclass(frozen=True)
class RoleFiles:
    """What the command was told.

    Args:
        conllu: a treebank; None where a parser reads the texts.
        text: whose tokens say what is rare; None for the run's training data, or else the treebank.
        coref: pronouns; None for none.
        relations: that are looked at; all by default.
        most_sentences: of the treebank and of the pronouns; None for all.
        parser: of the texts, see :func:`training.data.parsed_text.parse_texts`; None with a treebank.
        show: sentences whose attention is shown, one on each line; None for some of the treebank.
        maps: names of heads whose attention is drawn.
    """

    conllu: str | None
    text: str | None = None
    coref: str | None = None
    relations: tuple[str, ...] = ()
    most_sentences: int | None = None
    parser: str | None = None
    show: str | None = None
    maps: tuple[str, ...] = ()

    @property
    def of_trees(self) -> str:
        """What the trees come from, as errors and findings call it."""
        return repr(self.conllu if self.parser is None else self.text)

    def read_trees(self) -> list[Tree]:
        """The trees of the treebank, or of the texts by the parser.

        Raises:
            GateError: for whatever is wrong with files or parser.
        """
        if self.parser is None:
            assert self.conllu is not None
            return read_treebank(self.conllu)[: self.most_sentences]
        assert self.text is not None
        return parse_texts(self.parser, read_lines(self.text)[: self.most_sentences])[: self.most_sentences]


@dataclass(frozen=True)
class Encoded:
    """Sentences that the model takes.

    Args:
        pieces: of each.
        golds: what is known of each, in the same order.
        left_out: sentences that are too long or have no piece.
        pieceless: words without a piece, which count nowhere.
        limit: the most tokens that the model takes; None for any number.
    """

    pieces: list[Pieces]
    golds: list[Any]
    left_out: int
    pieceless: int
    limit: int | None = None

    def batches(self) -> Iterator[list[int]]:
        """Numbers of sentences of similar lengths, fewer at a time where they are long, so that attention takes as much memory
        in any data."""
        rows: list[int] = []
        for row in sorted(range(len(self.pieces)), key=lambda row: len(self.pieces[row].ids)):
            width = width_of([self.pieces[row].ids], self.limit)
            if len(rows) == BATCH or (rows and (len(rows) + 1) * width**2 > CELLS):
                yield rows
                rows = []
            rows.append(row)
        yield rows

    def ids(self, rows: Sequence[int]) -> Tensor:
        """The tokens of some sentences, ``[rows, width]``; -1 behind their ends."""
        found = [self.pieces[row].ids for row in rows]
        return padded(found, -1, width_of(found, self.limit))

    def words(self, rows: Sequence[int]) -> Tensor:
        """The word of each of these tokens; -1 for none."""
        found = [self.pieces[row].words for row in rows]
        return padded(found, -1, width_of(found, self.limit))

    def told(self, what: str) -> str:
        """What was left out, in words; empty if nothing was."""
        parts = [f"{counted(self.left_out, what)} too long for the model"] if self.left_out else []
        parts += [f"{counted(self.pieceless, 'word')} without a piece"] if self.pieceless else []
        return " and ".join(parts)


@dataclass(frozen=True)
class RoleTexts:
    """All that roles are measured on.

    Args:
        trees: of the treebank.
        relations: that are looked at.
        pronouns: None where no file is given.
        frequencies: of every token, for sources and for targets, ``[vocabulary]``.
        frequencies_from: what they are counted in.
        seen: tokens of the treebank, from which random sequences are drawn.
        parser: that made the trees; None for gold ones.
        shown: tokens of sentences whose attention is shown; empty for some of the treebank.
        maps: the number of its site, and its number there, of every head whose attention is drawn.
    """

    trees: Encoded
    relations: list[str]
    pronouns: Encoded | None
    frequencies: dict[str, Tensor]
    frequencies_from: str
    seen: list[int]
    parser: str | None = None
    shown: list[list[int]] = field(default_factory=list)
    maps: list[tuple[int, int]] = field(default_factory=list)


def read_texts(files: RoleFiles, observed: ObservedModel) -> RoleTexts:
    """Everything read and encoded.

    Raises:
        GateError: for whatever is wrong with the files, or a tokenizer that does not fit.
    """
    maps = _named_heads(files.maps, observed)
    shown = [] if files.show is None else _shown(files.show, observed)
    trees = files.read_trees()
    relations = relations_of(trees, files.relations)
    encoded = _encoded(observed, trees, f"every sentence of {files.of_trees}")
    pronouns = None
    if files.coref is not None:
        pronouns = _encoded(observed, read_coreference(files.coref)[: files.most_sentences], f"every text of {files.coref!r}")
    special = special_ids(observed.tokenizer)
    seen = sorted({token for pieces in encoded.pieces for token in pieces.ids} - special)
    if len(seen) < LEAST_KINDS:
        seen = [token for token in range(len(observed.tokenizer)) if token not in special]
    frequencies, told = _frequencies(files, observed, encoded)
    return RoleTexts(encoded, relations, pronouns, frequencies, told, seen, files.parser, shown, maps)


def special_ids(tokenizer: Any) -> set[int]:
    """Special tokens that stand for no word: all but the unknown one, unless it is the start, end or padding token too."""
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "cls", "sep", "mask")}
    return set(tokenizer.all_special_ids) - ({tokenizer.unk_token_id} - others)


def _named_heads(names: Sequence[str], observed: ObservedModel) -> list[tuple[int, int]]:
    """Where heads are that are called as in ``encoder.2.8``: kind, layer and number."""
    known = {f"{observed.sites[site].label}.{head}": (site, head) for site, head in observed.heads}
    for name in names:
        if name not in known:
            raise GateError(f"there is no head {name!r} to draw; the heads are {next(iter(known))} to {list(known)[-1]}")
    return [known[name] for name in names]


def _shown(file: str, observed: ObservedModel) -> list[list[int]]:
    """The tokens of a user's own sentences."""
    lines = read_lines(file)
    if not 1 <= len(lines) <= MOST_SHOWN:
        raise GateError(f"{file!r} has {len(lines)} sentences to show; expected 1 to {MOST_SHOWN}, one on each line")
    rows: list[list[int]] = observed.tokenizer(lines, verbose=False)["input_ids"]
    most = min(LONGEST_SHOWN, observed.limit or LONGEST_SHOWN)
    for line, row in zip(lines, rows, strict=True):
        if not 1 <= len(row) <= most:
            raise GateError(f"the sentence {line[:40]!r} to show has {len(row)} tokens; expected 1 to {most}")
    return rows


def _encoded(observed: ObservedModel, golds: Sequence[Tree | Pronoun], what: str) -> Encoded:
    found = encode_words(observed.tokenizer, [gold.words for gold in golds], observed.limit)
    kept = [(pieces, gold) for pieces, gold in zip(found, golds, strict=True) if pieces is not None]
    if not kept:
        raise GateError(f"{what} is longer than the {observed.limit} tokens of the model, or has no piece; give other texts")
    pieceless = sum(len(set(range(len(gold.words))) - set(pieces.words)) for pieces, gold in kept)
    return Encoded(
        [pieces for pieces, _ in kept], [gold for _, gold in kept], len(found) - len(kept), pieceless, observed.limit
    )


def _frequencies(files: RoleFiles, observed: ObservedModel, trees: Encoded) -> tuple[dict[str, Tensor], str]:
    """How often every token occurs, and where that was counted."""
    rows: dict[str, Iterable[Sequence[int]]]
    if files.text is not None:
        lines = read_lines(files.text)
        rows, told = {"source": observed.tokenizer(lines, verbose=False)["input_ids"]}, "the text given"
    elif observed.data is not None:
        split = observed.data.splits["train"]
        own = {"source": "source" if "source" in split.column_names else "input_ids"}
        own |= {"target": "target"} if "target" in split.column_names else {}
        rows, told = {name: split[column] for name, column in own.items()}, "the run's training data"
    else:
        rows, told = {"source": [pieces.ids for pieces in trees.pieces]}, "the treebank itself, as no text is given"
    counts = {name: _count(ids, observed) for name, ids in rows.items()}
    return {"target": counts["source"], **counts}, told


def _count(rows: Iterable[Sequence[int]], observed: ObservedModel) -> Tensor:
    counts = torch.zeros(len(observed.tokenizer), dtype=torch.long)
    for ids in rows:
        counts += torch.bincount(torch.tensor(list(ids), dtype=torch.long), minlength=len(counts))[: len(counts)]
    return counts


def width_of(rows: Sequence[Sequence[Any]], limit: int | None) -> int:
    """The longest row's length, up to a whole number of :data:`MULTIPLE` where the model takes so many tokens.

    >>> width_of([[1] * 5, [1] * 11], limit=None), width_of([[1] * 11], limit=12)
    (16, 12)
    """
    longest = max(map(len, rows))
    filled = -(-longest // MULTIPLE) * MULTIPLE
    return filled if limit is None else max(longest, min(filled, limit))


def padded(rows: Sequence[Sequence[int]], value: int, width: int | None = None) -> Tensor:
    """Rows filled up on the right, ``[rows, width]``; to the longest by default."""
    width = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)


def trees_of(rows: Sequence[int], texts: Encoded, relations: Sequence[str], device: torch.device) -> Trees:
    """The gold trees of a batch."""
    number = {relation: place for place, relation in enumerate(relations)}
    golds: list[Tree] = [texts.golds[row] for row in rows]
    size = width_of([gold.heads for gold in golds], None)
    return Trees(
        words=texts.words(rows).to(device),
        heads=padded([gold.heads for gold in golds], -1, size).to(device),
        relations=padded([[number.get(relation, -1) for relation in gold.relations] for gold in golds], -1, size).to(device),
    )


def mentions_of(rows: Sequence[int], texts: Encoded, device: torch.device) -> Mentions:
    """Pronouns and candidates of a batch."""
    golds: list[Pronoun] = [texts.golds[row] for row in rows]
    size = width_of([gold.words for gold in golds], None)

    def marked(words: Callable[[Pronoun], list[int]]) -> Tensor:
        marks = torch.zeros(len(golds), size, dtype=torch.bool)
        for mark, gold in zip(marks, golds, strict=True):
            mark[words(gold)] = True
        return marks.to(device)

    return Mentions(
        words=texts.words(rows).to(device),
        pronouns=marked(lambda gold: [gold.pronoun]),
        antecedents=marked(lambda gold: gold.antecedent),
        others=marked(lambda gold: gold.other),
    )


def repeats(observed: ObservedModel, seen: Sequence[int]) -> Iterator[Tensor]:
    """Batches of random sequences said twice, padded with -1."""
    start = observed.tokenizer.bos_token_id
    limit = observed.limit
    longest = LENGTHS[1] if limit is None else max(2, (limit - 1) // 2)
    rows = repeated_sequences(seen, REPEATED, start=start, longest=longest)
    parts = (rows[first : first + BATCH] for first in range(0, len(rows), BATCH))
    return (padded(part, -1, width_of(part, limit)) for part in parts)


def own_pairs(observed: ObservedModel) -> Iterator[Any]:
    """Batches of the run's own test pairs, up to a number; nothing where there are none."""
    if observed.data is None or "target" not in observed.data.splits["test"].column_names:
        return iter(())
    rows = 0

    def limited() -> Iterator[Any]:
        nonlocal rows
        for batch in islice(observed.data.test_dataloader(), MOST_PAIRS):  # type: ignore[union-attr]
            if rows >= MOST_PAIRS:
                return
            rows += len(batch["labels"])
            yield batch

    return limited()
