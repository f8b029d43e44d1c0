"""A file of running text, one text on each line."""

from __future__ import annotations

from training.data import parallel_text
from training.data.files import check_there


def read_lines(file: str) -> list[str]:
    """The lines of a UTF-8 text file that say something, also with ``.gz``; see :func:`training.data.parallel_text.read_lines`.

    Raises:
        GateError: for a file that is missing, empty or not UTF-8.
    """
    check_there(file, "text")
    return [line for line in parallel_text.read_lines(file) if line]
