"""The passes over texts in which a model's attention is watched, and the shares that come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from matplotlib.figure import Figure
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor

from gates.attention.sites import KINDS, Kind
from gates.errors import GateError
from gates.export.checkpoint import special_ids
from gates.roles.measures import (
    CONFIDENCE,
    LENGTHS,
    Mentions,
    Trees,
    copy_shares,
    coreference_shares,
    earlier_copies,
    positional_shares,
    rare_token_shares,
    repeated_sequences,
    sink_shares,
    syntactic_shares,
    token_counts,
)
from gates.roles.roles import (
    BROAD,
    COREFERENCE,
    DUPLICATE,
    FIRST_TOKEN,
    INDUCTION,
    POSITIONAL,
    RARE,
    SEPARATOR,
    SYNTACTIC,
    Role,
    Take,
    assign,
    observe_weights,
)
from gates.roles.shares import SentenceShares, Shares, View
from training.analysis.model import ObservedModel
from training.analysis.plots import attention_map
from training.data.tags import Pieces, encode_words
from training.data.trees import Pronoun, Tree, parse_texts, read_coreference, read_lines, read_treebank, relations_of
from training.runs import progress
from training.stats.numbers import counted
from training.tasks.base import IGNORED, shifted_right

# What roles are measured on: trees, pronouns, pairs and repeated sequences, as batches of tokens.

BATCH, CELLS = 32, 32 * 48**2
"""The most sentences of a batch, and the most pairs of their tokens: fewer sentences if they have more than 48 tokens."""
MULTIPLE = 8
"""Widths of batches are multiples of it: a CPU caches something for every new width, which would grow with the data."""
MOST_PAIRS = 1000
"""The most test pairs of a translator."""
MOST_SHOWN, LONGEST_SHOWN = 20, 64
"""The most sentences whose attention is shown, and the most tokens of each: a page holds all heads of them."""


@dataclass(frozen=True)
class RoleFiles:
    """The files and names in the options of the same names (``most_sentences`` is ``--sentences``); None if they are not given.

    A treebank and a parser of the texts exclude each other.
    """

    conllu: str | None
    text: str | None = None
    coref: str | None = None
    relations: tuple[str, ...] = ()
    most_sentences: int | None = None
    parser: str | None = None
    show: str | None = None
    maps: tuple[str, ...] = ()

    def read_trees(self) -> list[Tree]:
        """Return the trees of the treebank, or of the texts by the parser."""
        if self.parser is None:
            return read_treebank(str(self.conllu))[: self.most_sentences]
        return parse_texts(self.parser, read_lines(str(self.text))[: self.most_sentences])[: self.most_sentences]


@dataclass(frozen=True)
class Encoded:
    """Sentences that the model takes.

    Args:
        golds: The tree or pronoun of each sentence, in the same order.
        left_out: The number of sentences that are too long or have no piece.
        pieceless: The number of words without a piece, which count nowhere.
        limit: The most tokens that the model takes; None for any number.
    """

    pieces: list[Pieces]
    golds: list[Any]
    left_out: int
    pieceless: int
    limit: int | None = None

    def batches(self) -> Iterator[list[int]]:
        """Yield the numbers of sentences of similar lengths, fewer where they are long: memory does not depend on the data."""
        rows: list[int] = []
        for row in sorted(range(len(self.pieces)), key=lambda row: len(self.pieces[row].ids)):
            width = width_of([self.pieces[row].ids], self.limit)
            if len(rows) == BATCH or (rows and (len(rows) + 1) * width**2 > CELLS):
                yield rows
                rows = []
            rows.append(row)
        yield rows

    def ids(self, rows: Sequence[int]) -> Tensor:
        """Return the tokens of some sentences, ``[rows, width]``; -1 behind their ends."""
        found = [self.pieces[row].ids for row in rows]
        return padded(found, -1, width_of(found, self.limit))

    def words(self, rows: Sequence[int]) -> Tensor:
        """Return the word of each of these tokens; -1 for none."""
        found = [self.pieces[row].words for row in rows]
        return padded(found, -1, width_of(found, self.limit))

    def omissions(self, what: str) -> str:
        """Return the omitted texts and words in a phrase; empty if there are none."""
        parts = [f"{counted(self.left_out, what)} too long for the model"] if self.left_out else []
        parts += [f"{counted(self.pieceless, 'word')} without a piece"] if self.pieceless else []
        return " and ".join(parts)


@dataclass(frozen=True)
class RoleTexts:
    """All that roles are measured on.

    Args:
        trees: The sentences of the treebank.
        pronouns: The texts with pronouns; None without a file.
        frequencies: The frequency of every token, for sources and for targets, ``[vocabulary]``.
        frequencies_from: The texts in which they are counted, in words.
        seen: The tokens from which random sequences are drawn.
        shown: The tokens of sentences whose attention is shown; empty for some of the treebank.
        maps: The site's number, and the head's number there, of every head whose attention is drawn.
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
    """Read and encode the files."""
    maps = _named_heads(files.maps, observed)
    shown = [] if files.show is None else _shown(files.show, observed)
    trees = files.read_trees()
    relations = relations_of(trees, files.relations)
    source = files.conllu if files.parser is None else files.text
    encoded = _encoded(observed, trees, f"every sentence of {source!r}")
    pronouns = None
    if files.coref is not None:
        pronouns = _encoded(observed, read_coreference(files.coref)[: files.most_sentences], f"every text of {files.coref!r}")
    special = special_ids(observed.tokenizer)
    seen = sorted({token for pieces in encoded.pieces for token in pieces.ids} - special)
    if len(seen) < 16:  # too few for random sequences
        seen = [token for token in range(len(observed.tokenizer)) if token not in special]
    frequencies = _frequencies(files, observed, encoded)
    return RoleTexts(encoded, relations, pronouns, *frequencies, seen, files.parser, shown, maps)


def _named_heads(names: Sequence[str], observed: ObservedModel) -> list[tuple[int, int]]:
    """Return where heads are with names such as ``encoder.2.8``: kind, layer and number."""
    known = {f"{observed.sites[site].label}.{head}": (site, head) for site, head in observed.heads}
    for name in names:
        if name not in known:
            raise GateError(f"there is no head {name!r} to draw; the heads are {next(iter(known))} to {list(known)[-1]}")
    return [known[name] for name in names]


def _shown(file: str, observed: ObservedModel) -> list[list[int]]:
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
    """Return how often every token occurs, and where that was counted."""
    rows: dict[str, Iterable[Sequence[int]]]
    if files.text is not None:
        lines = read_lines(files.text)
        rows, where = {"source": observed.tokenizer(lines, verbose=False)["input_ids"]}, "the text given"
    elif observed.data is not None:
        split = observed.data.splits["train"]
        own = {"source": "source" if "source" in split.column_names else "input_ids"}
        own |= {"target": "target"} if "target" in split.column_names else {}
        rows, where = {name: split[column] for name, column in own.items()}, "the run's training data"
    else:
        rows, where = {"source": [pieces.ids for pieces in trees.pieces]}, "the treebank itself, as no text is given"
    counts = {name: _count(ids, observed) for name, ids in rows.items()}
    return {"target": counts["source"], **counts}, where


def _count(rows: Iterable[Sequence[int]], observed: ObservedModel) -> Tensor:
    counts = torch.zeros(len(observed.tokenizer), dtype=torch.long)
    for ids in rows:
        counts += torch.bincount(torch.tensor(list(ids), dtype=torch.long), minlength=len(counts))[: len(counts)]
    return counts


def width_of(rows: Sequence[Sequence[Any]], limit: int | None) -> int:
    """Return the longest row's length, up to a multiple of :data:`MULTIPLE` if that is within the limit."""
    longest = max(map(len, rows))
    filled = -(-longest // MULTIPLE) * MULTIPLE
    return filled if limit is None else max(longest, min(filled, limit))


def padded(rows: Sequence[Sequence[int]], value: int, width: int | None = None) -> Tensor:
    """Fill up rows on the right, ``[rows, width]``; to the longest by default."""
    width = max(map(len, rows)) if width is None else width
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.long)


def trees_of(rows: Sequence[int], texts: Encoded, relations: Sequence[str], device: torch.device) -> Trees:
    """Return the gold trees of a batch."""
    number = {relation: place for place, relation in enumerate(relations)}
    golds: list[Tree] = [texts.golds[row] for row in rows]
    size = width_of([gold.heads for gold in golds], None)
    return Trees(
        words=texts.words(rows).to(device),
        heads=padded([gold.heads for gold in golds], -1, size).to(device),
        relations=padded([[number.get(relation, -1) for relation in gold.relations] for gold in golds], -1, size).to(device),
    )


def mentions_of(rows: Sequence[int], texts: Encoded, device: torch.device) -> Mentions:
    """Return pronouns and candidates of a batch."""
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
    """Yield batches of 200 random sequences, each repeated once, padded with -1."""
    limit = observed.limit
    longest = LENGTHS[1] if limit is None else max(2, (limit - 1) // 2)
    rows = repeated_sequences(seen, 200, start=observed.tokenizer.bos_token_id, longest=longest)
    parts = (rows[first : first + BATCH] for first in range(0, len(rows), BATCH))
    return (padded(part, -1, width_of(part, limit)) for part in parts)


@dataclass(frozen=True)
class Measured:
    """The results of all passes.

    Args:
        roles: The roles of every head that is not pruned.
        syntactic: The shares of all relations and directions.
        columns: The names of these.
        coreference: The shares of pronouns; None without a file.
    """

    roles: list[Role]
    syntactic: Shares
    columns: list[str]
    coreference: Shares | None
    confidence: Tensor

    @property
    def unknown(self) -> list[str]:
        """The names of the roles for which no head had enough opportunities."""
        return [role.rule.name for role in self.roles if bool(role.strength.isnan().all())]


class RolePasses:
    """Run a model on texts and add up what its heads look at."""

    def __init__(self, observed: ObservedModel, texts: RoleTexts) -> None:
        self.observed, self.texts = observed, texts
        sites, device = observed.sites, observed.device
        self.positional = positional_shares(sites).to(device)
        self.sinks = sink_shares(sites).to(device)
        self.rare = rare_token_shares(sites).to(device)
        self.syntactic = syntactic_shares(sites, texts.relations).to(device)
        self.coreference = coreference_shares(sites).to(device)
        self.copies = copy_shares(sites).to(device)
        self.special = torch.tensor(sorted(special_ids(observed.tokenizer)), device=device)
        self.frequencies = {name: token_counts(counts.to(device)) for name, counts in texts.frequencies.items()}

    @property
    def has_decoder(self) -> bool:
        return any(site.kind == "decoder" for site in self.observed.sites)

    def run(self) -> Measured:
        with self.observed.at_rest():
            self._trees()
            if self.texts.pronouns is not None:
                self._pronouns()
            if self.has_decoder:
                self._repeats()
            if self.observed.is_encoder_decoder:
                self._pairs()
        return self._measured()

    # -- passes ------------------------------------------------------------------------------------------------

    def _trees(self) -> None:
        texts, device = self.texts.trees, self.observed.device
        for rows in progress.track(list(texts.batches()), "reading the treebank"):
            ids = texts.ids(rows).to(device)
            trees, views = trees_of(rows, texts, self.texts.relations, device), self._views(ids, rows)

            def take(site: int, weights: Tensor, ids: Tensor = ids, trees: Any = trees, views: Any = views) -> None:
                view = views[self.observed.sites[site].kind]
                self._common(site, weights, view, ids, "source")
                self.syntactic.observe(site, weights, view, trees)

            self._read(ids, take)

    def _pronouns(self) -> None:
        texts = self.texts.pronouns
        assert texts is not None
        for rows in progress.track(list(texts.batches()), "reading pronouns"):
            ids = texts.ids(rows).to(self.observed.device)
            mentions, views = mentions_of(rows, texts, self.observed.device), self._views(ids, rows)

            def take(site: int, weights: Tensor, mentions: Any = mentions, views: Any = views) -> None:
                self.coreference.observe(site, weights, views[self.observed.sites[site].kind], mentions)

            self._read(ids, take)

    def _repeats(self) -> None:
        batches = list(repeats(self.observed, self.texts.seen))
        for number, ids in enumerate(progress.track(batches, "reading repeated sequences")):
            ids = ids.to(self.observed.device)
            view = self._views(ids, range(number * len(batches[0]), number * len(batches[0]) + len(ids)))["decoder"]
            earlier = earlier_copies(ids, view.text)

            def take(site: int, weights: Tensor, view: View = view, earlier: Tensor = earlier) -> None:
                if self.observed.sites[site].kind == "decoder":
                    self.copies.observe(site, weights, view, earlier)

            if self.observed.is_encoder_decoder:
                inputs = _inputs(ids)
                with observe_weights(self.observed.backbone, self.observed.sites, take):
                    self.observed.backbone(**inputs, decoder_input_ids=inputs["input_ids"])
            else:
                self._read(ids, take)

    def _pairs(self) -> None:
        """Read decoder and cross attention on the run's own pairs, or without them on every sentence and itself."""
        first = 0
        for batch in progress.track(self._batches_of_pairs(), "reading pairs"):
            batch = move_data_to_device(batch, self.observed.device)
            inputs, labels = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"]
            inputs["decoder_input_ids"] = shifted_right(self.observed.backbone, labels)
            target = inputs["decoder_input_ids"].masked_fill(labels == IGNORED, -1)
            source = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -1)
            numbers = range(first, first + len(target))
            first += len(target)
            views = {"decoder": self._views(target, numbers)["decoder"]}
            text = self._is_text(source)
            views["cross"] = View(views["decoder"].sentences, views["decoder"].queries, source >= 0, text)
            tokens = {"decoder": (target, "target"), "cross": (source, "source")}

            def take(site: int, weights: Tensor, views: Any = views, tokens: Any = tokens) -> None:
                kind = self.observed.sites[site].kind
                if kind != "encoder":
                    self._common(site, weights, views[kind], *tokens[kind])

            with observe_weights(self.observed.backbone, self.observed.sites, take):
                self.observed.backbone(**inputs)

    def _batches_of_pairs(self) -> list[dict[str, Tensor]]:
        data, texts = self.observed.data, self.texts.trees
        if data is None or "target" not in data.splits["test"].column_names:
            tokens = [texts.ids(rows) for rows in texts.batches()]
            return [_inputs(ids) | {"labels": ids.masked_fill(ids < 0, IGNORED)} for ids in tokens]
        batches: list[dict[str, Tensor]] = []
        for batch in data.test_dataloader():
            if sum(len(read["labels"]) for read in batches) >= MOST_PAIRS:
                break
            batches.append(batch)
        return batches

    # -- parts of them -----------------------------------------------------------------------------------------

    def _read(self, ids: Tensor, take: Take) -> None:
        """Run the model on texts; of an encoder-decoder only the encoder."""
        backbone, sites = self.observed.backbone, self.observed.sites
        if not self.observed.is_encoder_decoder:
            with observe_weights(backbone, sites, take):
                backbone(**_inputs(ids))
            return
        places = [place for place, site in enumerate(sites) if site.kind == "encoder"]
        encoder = tuple(sites[place] for place in places)
        with observe_weights(backbone, encoder, lambda site, weights: take(places[site], weights)):
            backbone.get_encoder()(**_inputs(ids))

    def _common(self, site: int, weights: Tensor, view: View, ids: Tensor, side: str) -> None:
        """Observe the roles that are defined for every kind of attention."""
        frequency, common = self.frequencies[side]
        index = ids.clamp(min=0, max=len(frequency) - 1)
        self.positional.observe(site, weights, view)
        self.sinks.observe(site, weights, view)
        self.rare.observe(site, weights, view, frequency[index], common[index])

    def _is_text(self, ids: Tensor) -> Tensor:
        return (ids >= 0) & ~torch.isin(ids, self.special)

    def _views(self, ids: Tensor, numbers: Any) -> dict[Kind, View]:
        """Return a batch as bidirectional and as causal self-attention sees it."""
        text, sentences = self._is_text(ids), torch.tensor(list(numbers), device=ids.device)
        return {
            "encoder": View(sentences, text, ids >= 0, text),
            "decoder": View(sentences, text, ids >= 0, text, causal=True),
        }

    def _shares(self, metric: SentenceShares) -> Shares:
        """Return the shares of the heads that are not pruned."""
        return metric.compute().of_heads(self.observed.kept)

    def _measured(self) -> Measured:
        positional, sinks, rare = (self._shares(metric) for metric in (self.positional, self.sinks, self.rare))
        syntactic = self._shares(self.syntactic)
        coreference = self._shares(self.coreference) if self.texts.pronouns is not None else None
        roles = [assign(POSITIONAL, positional, self.positional.names)]
        roles += [assign(SYNTACTIC, syntactic, self.syntactic.names), assign(RARE, rare, self.rare.names)]
        if coreference is not None:
            compared = coreference.against_column(0, 1).of(0, 2)
            roles.append(assign(COREFERENCE, compared, [self.coreference.names[0], self.coreference.names[2]]))
        if self.has_decoder:
            copies = self._shares(self.copies)
            roles += [assign(rule, copies.of(column), [rule.name]) for column, rule in enumerate((INDUCTION, DUPLICATE))]
        for column, rule in enumerate((SEPARATOR, FIRST_TOKEN, BROAD)):
            roles.append(assign(rule, sinks.of(column), [rule.name]))
        return Measured(roles, syntactic, self.syntactic.names, coreference, sinks.value[:, CONFIDENCE])


def _inputs(ids: Tensor) -> dict[str, Tensor]:
    """Return tokens and mask of texts that are padded with -1."""
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long()}


# Attention of single heads in the first sentences, as pictures.


@dataclass(frozen=True)
class Shown:
    """One sentence with the attention of all heads.

    Args:
        tokens: By kind of attention, the tokens of queries and of keys.
        weights: For each site, ``[heads, query, key]``.
    """

    tokens: dict[str, tuple[list[str], list[str]]]
    weights: list[Tensor]


def shown_sentences(observed: ObservedModel, texts: RoleTexts) -> list[Shown]:
    """Return the sentences to show, by default three of the treebank that are neither short nor long.

    The decoder of an encoder-decoder reads them too.
    """
    rows = [pieces.ids for pieces in texts.trees.pieces if 5 <= len(pieces.ids) <= 30][:3]
    rows = texts.shown or rows or [texts.trees.pieces[0].ids]
    found = []
    with observed.at_rest():
        for row in rows:
            ids = padded([row], 0).to(observed.device)
            inputs, weights = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, [torch.empty(0)] * len(observed.sites)
            if observed.is_encoder_decoder:
                inputs["decoder_input_ids"] = shifted_right(observed.backbone, ids)

            def take(site: int, own: Tensor, weights: list[Tensor] = weights) -> None:
                weights[site] = own[0].float().cpu()

            with observe_weights(observed.backbone, observed.sites, take):
                observed.backbone(**inputs)
            source, target = (_names(observed, inputs.get(name, ids)) for name in ("input_ids", "decoder_input_ids"))
            sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
            found.append(Shown({kind: sides[kind] for kind in KINDS}, weights))
    return found


def _names(observed: ObservedModel, ids: Tensor) -> list[str]:
    return [str(token) for token in observed.tokenizer.convert_ids_to_tokens(ids[0].tolist())]


def maps_of_heads(observed: ObservedModel, shown: Sequence[Shown], heads: Sequence[tuple[int, int]]) -> dict[str, Figure]:
    """Draw the attention of some heads (site and number) in every sentence, by file name."""
    figures = {}
    for site, head in heads:
        name = f"{observed.sites[site].label}.{head}"
        for number, one in enumerate(shown, start=1):
            figure = _map(observed, one, site, head, f"{name}, sentence {number}")
            figures[f"attention_{name.replace('.', '_')}_{number}"] = figure
    return figures


def strongest_maps(observed: ObservedModel, shown: Shown, roles: Sequence[Role]) -> dict[str, Figure]:
    """Draw the strongest head of every role that some head has, in one sentence, by file name."""
    places, figures = observed.heads, {}
    for role in roles:
        if not bool(role.holds.any()):
            continue
        best = int(torch.where(role.holds, role.strength, -1.0).argmax())
        (site, head), name = places[best], role.rule.name
        by = "" if role.column[best] == name else f"{role.column[best]}, "
        title = f"{observed.sites[site].label}.{head}: {name}\n{by}{100 * float(role.strength[best]):.0f} %"
        figures[f"attention_{name.replace('-', '_')}"] = _map(observed, shown, site, head, title)
    return figures


def _map(observed: ObservedModel, shown: Shown, site: int, head: int, title: str) -> Figure:
    return attention_map(shown.weights[site][head].numpy(), *shown.tokens[observed.sites[site].kind], title)
