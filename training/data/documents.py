"""Running text from a hub dataset, from text files, or from a column of csv, tsv, jsonl or parquet files."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import Any

import datasets
import torch
import xxhash
from datasets import Dataset, Features, IterableDataset, Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gates.errors import GateError, first_line
from gates.export.checkpoint import check_known
from training.config.text import DocumentOptions, Documents, DocumentsAre
from training.data.base import StreamBatches, WithOwnTokenizer, distinct_aside, padded, with_more_tests
from training.data.files import check_text, check_there, ending_of, find_column, open_text
from training.data.text import read_file, read_hub
from training.data.translation import train_subwords
from training.runs import progress
from training.runs.hashing import probed
from training.tasks.base import IGNORED, encode_documents
from training.tasks.causal_lm import CausalLM, check_causal

# Documents of token ids as blocks of a fixed length. Pure functions.


@dataclass
class Block:
    """Inputs of a language model with the tokens that they are to predict.

    Args:
        input_ids: The tokens ``[length]`` of one or several documents, or parts of them, one after another.
        labels: The token that comes next in the same document, for each of them; the block need not hold it as an input.
        starts: The places where a document, or a part of one, begins.
        shares: For each of them, the number of its document and the share of that document's predictions that are here.
    """

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    shares: list[tuple[int, float]] = field(default_factory=list)


def packed(documents: Iterable[Sequence[int]], length: int, *, packing: bool = True) -> Iterator[Block]:
    """Cut documents into blocks so that every token after a document's first is predicted exactly once.

    A document that does not fit into the rest of a block continues in the next one, where it sees nothing of its beginning.
    No more documents are read than the next block needs.

    Args:
        documents: The ids of each document, from its start token to its end token; at least two.

    >>> found = packed([[1, 5, 2], [1, 6, 7, 8, 2]], 4)
    >>> [(block.input_ids, block.labels, block.starts) for block in found]
    [([1, 5, 1, 6], [5, 2, 6, 7], [0, 2]), ([7, 8], [8, 2], [0])]
    >>> [block.input_ids for block in packed([[1, 5, 2], [1, 6, 7, 8, 2]], 4, packing=False)]
    [[1, 5], [1, 6, 7, 8]]
    """
    block = Block()
    for number, ids in enumerate(documents):
        first, predictions = 0, len(ids) - 1
        if not packing and block.input_ids:
            yield block
            block = Block()
        while first < predictions:
            last = min(predictions, first + length - len(block.input_ids))
            block.starts.append(len(block.input_ids))
            block.input_ids += ids[first:last]
            block.labels += ids[first + 1 : last + 1]
            block.shares.append((number, (last - first) / predictions))
            first = last
            if len(block.input_ids) == length:
                yield block
                block = Block()
    if block.input_ids:
        yield block


def positions(starts: Sequence[int], length: int) -> list[int]:
    """Return the place of every token in its document, or part of one, ``[length]``: it starts again at each of ``starts``.

    >>> positions([0, 2], 5)
    [0, 1, 0, 1, 2]
    """
    ends = [*starts[1:], length]
    return [place for start, end in zip(starts, ends, strict=True) for place in range(end - start)]


# What all running text has in common: a tokenizer, documents cut into blocks, and batches of them.


class TextBlocks(WithOwnTokenizer):
    """Documents of running text, cut into blocks of ``max_length`` tokens. Subclasses read the documents."""

    options: DocumentOptions
    unit = "blocks"
    at_once = 1000
    """The number of documents that are tokenized together."""

    @abstractmethod
    def load_documents(self) -> Mapping[str, Iterable[str]]:
        """Return the texts of the three splits, and of further test splits."""

    def limit_of(self, split: str) -> str | None:
        """Return the option that limits the blocks of a split in memory; by default none."""
        return None

    def check_backbone(self, config: Any, name: str) -> None:
        check_causal(config, name)

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        documents = self.load_documents()
        self.tokenizer = self.load_tokenizer(backbone, documents["train"])
        for name in with_more_tests(documents):
            rows, option = self.rows_of(documents[name]), self.limit_of(name)
            limit = None if option is None else getattr(self.options, option)
            self.splits[name] = self.as_split(name, islice(rows, limit))
            if not len(self.splits[name]):
                aside = name == "select" and self.set_aside
                mend = "; give a --data.select_file, or a larger --data.select_fraction" if aside else ""
                raise GateError(f"the {name} split has no text; expected at least one document{mend}")
            if name != "train" and next(rows, None) is not None:
                self.notices.append(f"the {name} split is its first {limit} blocks; --data.{option} takes more of the stream")
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def load_tokenizer(self, backbone: str | None, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the options, the backbone's, or a new one trained on the training texts."""
        options = self.options
        return self.named_tokenizer(backbone) or train_subwords(
            texts, kind=options.subwords, vocab_size=options.vocab_size, max_length=options.max_length
        )

    def rows_of(self, texts: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield blocks of texts, each with the bytes and words of its text."""
        assert self.tokenizer is not None
        tokenizer, sizes = self.tokenizer, dict[int, tuple[int, int]]()

        def encoded() -> Iterator[list[int]]:
            written, number = (text for text in texts if text.strip()), count()
            while several := list(islice(written, self.at_once)):
                for text, ids in zip(several, encode_documents(tokenizer, several), strict=True):
                    sizes[next(number)] = (len(text.encode()), len(text.split()))
                    yield ids

        for block in packed(encoded(), self.options.max_length, packing=self.options.packing):
            yield {
                "input_ids": block.input_ids,
                "labels": block.labels,
                "starts": block.starts,
                "bytes": sum(sizes[number][0] * part for number, part in block.shares),
                "words": sum(sizes[number][1] * part for number, part in block.shares),
                "length": len(block.input_ids),
            }
            last, _ = block.shares[-1]  # which may continue in the next block
            while (oldest := next(iter(sizes))) < last:
                del sizes[oldest]

    def as_split(self, name: str, rows: Iterable[dict[str, Any]]) -> Dataset:
        """Return blocks as a split, and note how many tokens the tokenizer does not know.

        A model predicts one unknown token for all of them, so perplexities leave out their words.
        """
        rows = list(rows)
        columns = ("input_ids", "labels", "starts", "bytes", "words", "length")
        split = Dataset.from_dict({column: [row[column] for row in rows] for column in columns})
        unknown = None if self.tokenizer is None else self.tokenizer.unk_token_id
        is_end = unknown == getattr(self.tokenizer, "eos_token_id", None)  # GPT-2 names its end token so too
        found = 0 if unknown is None or is_end else sum(row["labels"].count(unknown) for row in rows)
        if name != "train" and found:
            self.notices.append(
                f"{found} of {sum(row['length'] for row in rows)} tokens of the {name} split are unknown to the tokenizer; a "
                "perplexity per word or byte leaves them out and is too low"
            )
        return split

    @property
    def task(self) -> CausalLM:
        return CausalLM(packing=self.options.packing, max_length=self.options.max_length)

    def collate(self, split: str) -> StackBlocks:
        return StackBlocks(packing=self.options.packing)


@dataclass(frozen=True)
class StackBlocks:
    """Make a batch of blocks, padded on the right to the longest; labels are -100 there.

    Args:
        packing: Whether blocks hold several documents. Positions then start again with each, in place of a mask.
    """

    packing: bool

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {
            "input_ids": padded([row["input_ids"] for row in rows], 0),
            "labels": padded([row["labels"] for row in rows], IGNORED),
            "bytes": torch.tensor([row["bytes"] for row in rows], dtype=torch.float64),
            "words": torch.tensor([row["words"] for row in rows], dtype=torch.float64),
        }
        longest = batch["input_ids"].shape[1]
        if not self.packing:
            return batch | {"attention_mask": (batch["labels"] != IGNORED).long()}
        # Padding is one more document, which none of the others sees.
        starts = [row["starts"] + [row["length"]] * (row["length"] < longest) for row in rows]
        return batch | {"position_ids": torch.tensor([positions(own, longest) for own in starts])}


class DocumentsData(TextBlocks):
    """Documents of the user's own, read whole."""

    options: Documents

    def load_documents(self) -> dict[str, list[str]]:
        found = {name: list(stream.texts()) for name, stream in open_streams(self.options).items()}
        if "select" not in found:
            found["train"], found["select"] = set_aside(found["train"], self.options.select_fraction)
            self.set_aside = True
        return found


def stream_documents(file: str, documents: DocumentsAre, longest: int | None = None) -> Iterator[str]:
    """Yield the documents of a text file, ``.gz`` too, one after another and without empty ones."""
    lines: list[str] = []
    size = 0
    with open_text(file) as stream:
        for line in stream:
            lines.append(line.replace("\r\n", "\n"))
            size += len(line)
            if longest is not None and size > longest:
                raise GateError(
                    f"a document of {file!r} has more than {longest:,} characters; see --data.documents for where documents end"
                )
            if documents == "line" or (documents == "blank_line" and not line.strip()):
                if text := "".join(lines).strip():
                    yield text
                lines, size = [], 0
    if text := "".join(lines).strip():
        yield text


def set_aside(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Set documents aside at random, at least one; copies of a text are all on one side."""
    if len(set(documents)) < 2:
        raise GateError(
            "the train split has one document, so no part can be set aside; give a --data.select_file, or set "
            "--data.documents to where documents end"
        )
    taken = distinct_aside(documents, fraction)
    return [text for text in documents if text not in taken], [text for text in dict.fromkeys(documents) if text in taken]


# Documents one after another, from local files, folders and datasets of the hub. Memory holds one shuffle buffer of a stream.

BUILDERS = {".jsonl": "json", ".parquet": "parquet"}
"""Readers of ``datasets`` by the endings of files."""
LONGEST = 100_000_000
"""The most characters of a document."""


@dataclass(frozen=True)
class TextStream:
    """The texts of a split, which can be read several times, in an order that the seed decides.

    ``content`` is a key that tells the split from another one.
    """

    name: str
    rows: Any
    column: str
    content: str = ""

    def texts(self, seed: int | None = None, buffer: int = 1) -> Iterator[str]:
        """Yield all texts; without a seed, in the order of the file."""
        rows = self.rows if seed is None or buffer == 1 else self.rows.shuffle(seed=seed, buffer_size=buffer)
        for number, row in enumerate(self._read(rows), start=1):
            text = row[self.column]
            if not isinstance(text, str):
                raise GateError(f"{self.column!r} of document {number} of the {self.name} split is {text!r}; expected a text")
            yield text

    def _read(self, rows: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from rows
        except GateError:
            raise
        except Exception as error:  # connections, archives and mixed rows raise many kinds
            raise GateError(f"the {self.name} split cannot be read to its end: {first_line(error)}") from error


def open_streams(options: Documents) -> dict[str, TextStream]:
    """Return the existing splits by this project's names; only their beginnings are read if the options say streaming."""
    if options.dataset is None:
        read = _stream_of_file if options.streaming else _text_of_file
        return {name: read(name, file, options) for name, file in options.files.items()}
    if options.streaming:
        return _streams_of_hub(options, options.dataset)
    hub = read_hub(options, instead="--data.train_file")
    return {name: _text_of_split(name, split, options) for name, split in hub.items()}


def _text_of_split(name: str, split: Dataset, options: Documents) -> TextStream:
    column = _column(name, split.column_names, options)
    return TextStream(name, split.select_columns(column), column)


def _text_of_file(name: str, file: str, options: Documents) -> TextStream:
    if ending_of(file) != ".txt":
        return _text_of_split(name, read_file(file), options)
    check_there(file, name)
    check_text(file)
    return TextStream(name, list(_rows_of_text(file, options.documents, None)), "text")


def _stream_of_file(name: str, file: str, options: Documents) -> TextStream:
    check_there(file, name)
    ending = ending_of(file)
    if ending == ".txt":
        given = {"file": file, "documents": options.documents}
        rows = IterableDataset.from_generator(_rows_of_text, Features({"text": Value("string")}), given)
        return TextStream(name, rows, "text", probed(file))
    if ending not in BUILDERS:
        raise GateError(
            f"the {name} file {file!r} has the ending {ending!r}; expected .txt, .jsonl (both also with .gz) or .parquet "
            "for streaming"
        )
    builder = BUILDERS[ending]
    try:
        rows = datasets.load_dataset(builder, data_files=file, split="train", streaming=True)
    except Exception as error:
        raise GateError(f"the {name} file {file!r} cannot be read as {builder}: {first_line(error)}") from error
    return TextStream(name, rows, _column_of_stream(name, rows, options), probed(file))


def _rows_of_text(file: str, documents: DocumentsAre, longest: int | None = LONGEST) -> Iterator[dict[str, str]]:
    for text in stream_documents(file, documents, longest):
        yield {"text": text}


def _streams_of_hub(options: Documents, dataset: str) -> dict[str, TextStream]:
    """Return splits of a dataset of the hub, or of a folder as ``datasets`` reads it."""
    where = f"{dataset!r}" + (f" ({options.subset})" if options.subset else "")
    try:
        builder = datasets.load_dataset_builder(dataset, options.subset)
        found: Any = builder.as_streaming_dataset()
    except Exception as error:  # the hub client raises many kinds of network and lookup errors
        raise GateError(
            f"cannot stream the dataset {where}, which is neither a local folder nor a reachable hub name; check the name or "
            "the network, or give local files with --data.train_file"
        ) from error
    streams = {}
    for name, split in options.split_names.items():
        if split is None:
            continue
        if split not in found:
            raise GateError(f"the dataset {where} has no split {split!r} for {name}; it has {', '.join(found)}")
        files = (builder.config.data_files or {}).get(split, [builder.hash])
        content = " ".join(probed(file) if os.path.isfile(file) else str(file) for file in files)  # the others name a commit
        streams[name] = TextStream(name, found[split], _column_of_stream(name, found[split], options), content)
    return streams


def _column(name: str, columns: Sequence[str], options: Documents) -> str:
    given = columns[0] if options.text_column is None and len(columns) == 1 else options.text_column
    return find_column(f"the {name} split", "text", columns, given, ("text",))


def _column_of_stream(name: str, rows: IterableDataset, options: Documents) -> str:
    try:
        with closing(iter(rows)) as found:
            columns = rows.column_names or [*next(found)]
    except StopIteration:
        raise GateError(f"the {name} split has no text; expected at least one document") from None
    except Exception as error:
        raise GateError(f"the {name} split cannot be read: {first_line(error)}") from error
    return _column(name, columns, options)


# Streaming during training, so that memory does not depend on the length of the text.
#
# Block i of the stream is a function of the data, the seed and i. A resumed run reads up to the block that it stopped at.


def documents_data(options: Documents) -> TextBlocks:
    """Return the data module of documents that are read whole or as a stream."""
    return StreamedDocumentsData(options) if options.streaming else DocumentsData(options)


class StreamedRows:
    """Rows of an endless stream by number; reading is cheap while numbers rise. ``begin`` restarts the stream."""

    def __init__(self, begin: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self.begin = begin
        self._rows: Iterator[dict[str, Any]] | None = None
        self._next = 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row after skipping the rows before it, from the beginning if the number is lower than the last one."""
        if self._rows is None or number < self._next:
            self._rows, self._next = self.begin(), 0
        between = range(self._next, number)
        for _ in progress.track(between, "skipping blocks of earlier training") if len(between) >= 1000 else between:
            next(self._rows)
        self._next = number + 1
        return next(self._rows)


class StreamedDocumentsData(TextBlocks):
    """Documents as a stream.

    Training blocks are read when needed. The first blocks of each split stay in memory for scores, choices and results.
    The options limit their number.
    """

    options: Documents
    at_once = 100

    def __init__(self, options: Documents) -> None:
        super().__init__(options)
        self.streams: dict[str, TextStream] = {}
        self._training: StreamedRows | None = None

    def load_documents(self) -> dict[str, Iterator[str]]:
        self.streams = open_streams(self.options)
        self.set_aside = "select" not in self.streams
        seeds = {"train": self.options.seed}  # not that of the run, so that all runs have the same splits
        return {name: self._texts(name, seeds.get(name)) for name in with_more_tests(self.streams)}

    def limit_of(self, split: str) -> str:
        return {"train": "kept_blocks", "select": "select_blocks"}.get(split, "test_blocks")

    def load_tokenizer(self, backbone: str | None, texts: Iterable[str]) -> PreTrainedTokenizerBase:
        """Return the tokenizer, a new one by the first 10,000 texts of another pass over the stream."""
        return super().load_tokenizer(backbone, islice(self._texts("train", self.options.seed), 10_000))

    def details(self) -> list[str]:
        return [f"training reads {self.options.train_blocks:,} blocks of a stream in each epoch"]

    def _texts(self, name: str, seed: int | None) -> Iterator[str]:
        """Yield the texts of a split once.

        Without a selection split, a hash of each training text decides on its side, so copies of a text stay together.
        """
        stream = self.streams.get(name) or self.streams["train"]
        texts = stream.texts(seed, self.options.shuffle_buffer)
        if name not in ("train", "select") or "select" in self.streams:
            return texts
        limit = self.options.select_fraction * 2**64
        return (text for text in texts if (xxhash.xxh3_64_intdigest(text.encode()) < limit) == (name == "select"))

    def _endless(self) -> Iterator[dict[str, Any]]:
        """Yield the blocks of the training texts, over and over, in a new order each time."""
        passes = (self._texts("train", self.seed * 1_000_003 + number) for number in count())
        return self.rows_of(chain.from_iterable(passes))

    @property
    def training_rows(self) -> StreamedRows:
        if self._training is None:
            self._training = StreamedRows(self._endless)
        return self._training

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> StreamBatches:
        blocks = self.options.train_blocks
        assert blocks is not None  # the options have checked it
        return StreamBatches(blocks, self.options.batch_size, epochs=epochs, first=first, rank=rank, world=world)

    @property
    def order(self) -> str:
        options = self.options
        content = [f"{name} {stream.column} {stream.content}" for name, stream in self.streams.items()]
        settings = f"{options.train_blocks} {options.shuffle_buffer} {options.select_fraction} {options.documents}"
        return " ".join([super().order, settings, *content])
