"""Texts of documents as a stream, from local files, folders and data sets of the hub: as many in memory as a buffer holds."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Features, IterableDataset, Value

from gates.errors import GateError, first_line
from training.config.data import Documents
from training.config.documents import DocumentsAre
from training.data.documents_base import text_column
from training.data.hashing import probed

BUILDERS = {".jsonl": "json", ".parquet": "parquet"}
"""Readers of ``datasets`` by the endings of files."""
LONGEST = 100_000_000
"""Characters of a document."""


@dataclass(frozen=True)
class TextStream:
    """The texts of a split, which can be read any number of times, in as many orders as there are seeds.

    Args:
        name: of the split.
        rows: with a column of texts.
        column: its name.
        content: what tells the split from another one.
    """

    name: str
    rows: IterableDataset
    column: str
    content: str

    def texts(self, seed: int | None = None, buffer: int = 1) -> Iterator[str]:
        """All texts.

        Args:
            seed: of their order; None for the one that they have.
            buffer: texts among which the next one is drawn.

        Raises:
            GateError: if the data turn out to be damaged, or no texts.
        """
        rows = self.rows if seed is None or buffer == 1 else self.rows.shuffle(seed=seed, buffer_size=buffer)
        for number, row in enumerate(self._read(rows), start=1):
            text = row[self.column]
            if not isinstance(text, str):
                raise GateError(f"{self.column!r} of document {number} of the {self.name} split is {text!r}; expected a text")
            yield text

    def _read(self, rows: Iterable[Any]) -> Iterator[Any]:
        try:
            with closing(iter(rows)) as found:  # type: ignore[type-var]
                yield from found
        except GateError:
            raise
        except Exception as error:  # of connections, of packed files, of rows that do not fit
            raise GateError(f"the {self.name} split cannot be read to its end: {first_line(error)}") from error


def open_streams(options: Documents) -> dict[str, TextStream]:
    """The splits that there are, by our names; nothing but their beginnings is read.

    Raises:
        GateError: for data that are not there, of a form that cannot be streamed, or without a column of texts.
    """
    if options.dataset is not None:
        return _of_hub(options, options.dataset)
    return {name: _of_file(name, file, options) for name, file in options.files.items()}


def _of_file(name: str, file: str, options: Documents) -> TextStream:
    if not os.path.isfile(file):
        raise GateError(f"the {name} file {file!r} does not exist; check the path")
    ending = Path(file.removesuffix(".gz")).suffix
    if ending == ".txt":
        rows = IterableDataset.from_generator(
            _rows_of_text, Features({"text": Value("string")}), {"file": file, "documents": options.documents}
        )
        return TextStream(name, rows, "text", probed(file))
    if ending not in BUILDERS:
        raise GateError(
            f"the {name} file {file!r} has the ending {ending!r}; a stream is of .txt or .jsonl, also with .gz, or of .parquet"
        )
    builder = BUILDERS[ending]
    try:
        rows = datasets.load_dataset(builder, data_files=file, split="train", streaming=True)
    except Exception as error:
        raise GateError(f"the {name} file {file!r} cannot be read as {builder}: {first_line(error)}") from error
    return TextStream(name, rows, _column(name, rows, options), probed(file))


def _of_hub(options: Documents, dataset: str) -> dict[str, TextStream]:
    """Splits of a data set of the hub, or of a folder as ``datasets`` reads it, in as many files as it has."""
    where = f"{dataset!r}" + (f" ({options.subset})" if options.subset else "")
    try:
        builder = datasets.load_dataset_builder(dataset, options.subset)
        found: Any = builder.as_streaming_dataset()
    except Exception as error:  # the hub client raises many kinds of network and lookup errors
        raise GateError(
            f"cannot stream the data set {where}: it is neither a local folder nor a hub name that can be reached; check the "
            "name or the network, or give local files with --data.train_file"
        ) from error
    streams = {}
    for name, split in options.split_names.items():
        if split is None:
            continue
        if split not in found:
            raise GateError(f"the data set {where} has no split {split!r} for {name}; it has {', '.join(found)}")
        files = (builder.config.data_files or {}).get(split, [builder.hash])
        content = " ".join(probed(file) if os.path.isfile(file) else str(file) for file in files)  # the others name a commit
        streams[name] = TextStream(name, found[split], _column(name, found[split], options), content)
    return streams


def _column(name: str, rows: IterableDataset, options: Documents) -> str:
    """The column of texts."""
    try:
        with closing(iter(rows)) as found:
            columns = rows.column_names or [*next(found)]
    except StopIteration:
        raise GateError(f"the {name} split has no text; expected at least one document") from None
    except Exception as error:
        raise GateError(f"the {name} split cannot be read: {first_line(error)}") from error
    return text_column(name, columns, options.text_column)


def _rows_of_text(file: str, documents: DocumentsAre) -> Iterator[dict[str, str]]:
    for text in stream_documents(file, documents):
        yield {"text": text}


def stream_documents(file: str, documents: DocumentsAre) -> Iterator[str]:
    """The documents of a text file, ``.gz`` too, one behind the other; see :func:`training.data.documents.read_documents`."""
    opener: Any = gzip.open if file.endswith(".gz") else open
    lines: list[str] = []
    size = 0
    with opener(file, "rt", encoding="utf-8-sig", newline=None) as stream:
        for line in stream:
            lines.append(line)
            size += len(line)
            if size > LONGEST:
                raise GateError(
                    f"a document of {file!r} has more than {LONGEST:,} characters; see --data.documents for where documents end"
                )
            if documents == "line" or not line.strip():
                if text := "".join(lines).strip():
                    yield text
                lines, size = [], 0
    if text := "".join(lines).strip():
        yield text
