"""Running text from a hub data set, from text files, or from a column of csv, tsv, jsonl or parquet files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
from datasets import Dataset

from gates.errors import GateError
from training.config.data import Documents
from training.config.documents import DocumentsAre
from training.data.documents_base import TextBlocks, text_column
from training.data.files import check_text
from training.data.text import read_file, read_hub


class DocumentsData(TextBlocks):
    """Documents of the user's own.

    Args:
        options: what the data are told.
    """

    options: Documents

    def __init__(self, options: Documents) -> None:
        super().__init__(options)

    def load_documents(self) -> dict[str, list[str]]:
        options = self.options
        if options.dataset is not None:
            hub = read_hub(options.dataset, options.subset, options.split_names, instead="--data.train_file")
            found = {name: self._column(name, split) for name, split in hub.items()}
        else:
            found = {name: self._read_local(name, file) for name, file in options.files.items()}
        if "select" not in found:
            found["train"], found["select"] = set_aside(found["train"], options.select_fraction)
        return found

    def _read_local(self, name: str, file: str) -> list[str]:
        if Path(file.removesuffix(".gz")).suffix == ".txt":
            return read_documents(file, self.options.documents)
        return self._column(name, read_file(file))

    def _column(self, name: str, split: Dataset) -> list[str]:
        wanted = text_column(name, split.column_names, self.options.text_column)
        texts = split[wanted][:]
        for row, text in enumerate(texts, start=1):
            if not isinstance(text, str):
                raise GateError(f"{wanted!r} of document {row} of the {name} split is {text!r}; expected a text")
        return list(texts)


def read_documents(file: str, documents: DocumentsAre) -> list[str]:
    """The documents of a text file, ``.gz`` too, without those that are empty.

    Args:
        file: path.
        documents: where a document ends: at a ``blank_line``, with each ``line``, or with the ``file``.

    Raises:
        GateError: if it is missing, empty, not UTF-8 or not whole.
    """
    path = Path(file)
    if not path.is_file():
        raise GateError(f"the data file {file!r} does not exist; check the path")
    check_text(path, "text")
    content = (gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes())
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    parts = [text] if documents == "file" else text.split("\n") if documents == "line" else re.split(r"\n[^\S\n]*\n", text)
    return [stripped for part in parts if (stripped := part.strip())]


def set_aside(documents: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Documents chosen at random set aside, at least one; a text that occurs again is on one side alone.

    Raises:
        GateError: if there is one document alone.
    """
    distinct = list(dict.fromkeys(documents))
    if len(distinct) < 2:
        raise GateError(
            "the train split has one document, of which no part can be set aside; give a --data.select_file, or say with "
            "--data.documents where documents end"
        )
    order = np.random.default_rng(0).permutation(len(distinct))
    taken = {distinct[index] for index in order[: min(len(distinct) - 1, max(1, round(fraction * len(distinct))))]}
    return [text for text in documents if text not in taken], [text for text in distinct if text in taken]
