"""Running text that is read while the run goes on, so that memory does not depend on how much of it there is.

Documents are packed as they come. A block of the stream is known by its number: it is a function of the data, the seed and the
number, so that a run that is resumed finds the block that it stopped at, by reading up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import Any

import xxhash

from gates.errors import GateError
from gates.export.vocabulary import check_known
from training.config.data import Documents
from training.data.base import with_more_tests
from training.data.batches import StreamBatches
from training.data.documents import DocumentsData
from training.data.documents_base import TextBlocks
from training.data.streams import TextStream, open_streams
from training.runs import progress

AT_ONCE = 100
"""Documents that are tokenized together."""
OF_VOCABULARY = 10_000
"""Documents, at most, of which a vocabulary is trained."""
LIMITS = {"train": "kept_blocks", "select": "select_blocks"}
"""Options that say how many blocks of a split are kept; of every test split it is ``test_blocks``."""
FAR = 1000
"""Blocks to be read over, from which on it is told."""


def documents_data(options: Documents) -> TextBlocks:
    """The data module of the user's own documents: read whole, or as a stream."""
    return StreamedDocumentsData(options) if options.streaming else DocumentsData(options)


class StreamedRows:
    """Rows of an endless stream by number, cheap where numbers rise.

    Args:
        begin: gives the rows from the first on.
    """

    def __init__(self, begin: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self.begin = begin
        self._rows: Iterator[dict[str, Any]] | None = None
        self._next = 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """A row; what lies before it is read over, from the beginning where the number is lower than the last one."""
        if self._rows is None or number < self._next:
            self._rows, self._next = self.begin(), 0
        between = range(self._next, number)
        for _ in progress.track(between, "reading over what was trained on before") if len(between) >= FAR else between:
            next(self._rows)
        self._next = number + 1
        return next(self._rows)


class StreamedDocumentsData(TextBlocks):
    """Documents of the user's own, as a stream.

    Training blocks are taken from it as they are needed. Kept in memory are the splits by which heads are scored and chosen and
    results are told: the first blocks of each, as many as the options say. The training split among them is a sample.

    Args:
        options: what the data are told.
    """

    options: Documents

    def __init__(self, options: Documents) -> None:
        super().__init__(options)
        self.streams: dict[str, TextStream] = {}
        self._training: StreamedRows | None = None

    def load_documents(self) -> dict[str, list[str]]:
        raise AssertionError("a stream is not loaded")

    def build(self, backbone: str | None, stated_labels: list[str] | None = None) -> None:
        if self.splits:
            return
        options = self.options
        self.streams = open_streams(options)
        seed = options.seed  # splits are the same for all seeds of runs
        self.tokenizer = self.load_tokenizer(backbone, islice(self._texts("train", seed), OF_VOCABULARY))
        for name in with_more_tests(self.streams):
            limit = LIMITS.get(name, "test_blocks")
            rows = self.rows_of(self._texts(name, seed if name == "train" else None), at_once=AT_ONCE)
            self.splits[name] = self.as_split(name, islice(rows, getattr(options, limit)))
            if not len(self.splits[name]):
                mend = "; give a --data.select_file, or a larger --data.select_fraction" if name == "select" else ""
                raise GateError(f"the {name} split has no text; expected at least one document{mend}")
            if name != "train" and next(rows, None) is not None:
                self.notices.append(
                    f"the {name} split is its first {getattr(options, limit)} blocks; --data.{limit} takes more of the stream"
                )
        check_known(self.tokenizer, self.splits["train"]["input_ids"], repr(self.tokenizer.name_or_path))

    def _texts(self, name: str, seed: int | None) -> Iterator[str]:
        """The texts of a split once. Without a selection split of its own, a hash of each training text says on which side it
        is, so that one that occurs again is on the same."""
        stream = self.streams.get(name) or self.streams["train"]
        texts = stream.texts(seed, self.options.shuffle_buffer)
        if name not in ("train", "select") or "select" in self.streams:
            return texts
        return (text for text in texts if self._is_set_aside(text) == (name == "select"))

    def _is_set_aside(self, text: str) -> bool:
        return xxhash.xxh3_64_intdigest(text.encode()) < self.options.select_fraction * 2**64

    def _endless(self) -> Iterator[dict[str, Any]]:
        """The blocks of the training texts, over and over, in a new order each time."""
        passes = (self._texts("train", self.seed * 1_000_003 + number) for number in count())
        return self.rows_of(chain.from_iterable(passes), at_once=AT_ONCE)

    @property
    def training_rows(self) -> StreamedRows:
        if self._training is None:
            self._training = StreamedRows(self._endless)
        return self._training

    def batches_of_run(self, *, epochs: float, first: int, rank: int, world: int) -> StreamBatches:
        blocks = self.options.train_blocks
        assert blocks is not None  # as the options have seen to
        return StreamBatches(blocks, self.options.batch_size, epochs=epochs, first=first, rank=rank, world=world)

    @property
    def order(self) -> str:
        options = self.options
        content = [f"{name} {stream.column} {stream.content}" for name, stream in self.streams.items()]
        told = f"{options.train_blocks} {options.shuffle_buffer} {options.select_fraction} {options.documents}"
        return " ".join([super().order, told, *content])
