"""A file of running text, one text on each line."""

from __future__ import annotations

import gzip
from pathlib import Path

from training.data.files import check_text, check_there


def read_lines(file: str) -> list[str]:
    """The lines of a UTF-8 text file that say something, also with ``.gz``.

    Raises:
        GateError: for a file that is missing, empty or not UTF-8.
    """
    check_there(file, "text")
    check_text(Path(file), "text")
    opener = gzip.open if file.endswith(".gz") else open
    with opener(file, "rt", encoding="utf-8-sig") as stream:
        return [line.strip() for line in stream if line.strip()]
