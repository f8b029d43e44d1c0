"""Tables in a document, each between a comment with the command that makes it and ``<!-- end -->``::

<!-- python -m training summary notebooks/results/sst2_seeds --stage 'post hoc' -->
...
<!-- end -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from gates.errors import GateError
from gates.files import refuse_other_than_file, replacing
from training.cli.line import parse


def tables_of(command: str) -> re.Pattern[str]:
    """A table of a command, such as ``summary``, from the comment that begins it to the one that ends it."""
    return re.compile(
        rf"(?P<begin><!-- python -m training {command} (?P<arguments>[^\n]*?) -->)\r?\n.*?<!-- end -->", re.DOTALL
    )


def update_tables(document: Path, command: str, parser: ArgumentParser, make: Callable[[Sequence[str], Any], str]) -> None:
    """Make every table of a command in a document anew.

    Args:
        document: a text file.
        command: its tables.
        parser: of the command.
        make: a table as Markdown, from the arguments in the document and what the parser makes of them.

    Raises:
        GateError: if the document cannot be read, has no such table, or a command in it is wrong.
    """
    if not document.is_dir():
        refuse_other_than_file(document)  # a pipe might never end
    try:
        with document.open(encoding="utf-8", newline="") as file:  # lines end as they did
            text = file.read()
    except OSError as error:
        raise GateError(f"cannot read {str(document)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GateError(f"{str(document)!r} is not UTF-8 text, so it has no tables to make anew; check --update") from error
    tables = tables_of(command)
    if not tables.search(text):
        raise GateError(
            f"{str(document)!r} has no table to make anew: no line <!-- python -m training {command} ... --> with a line "
            "<!-- end --> after it; check --update"
        )

    def made(match: re.Match[str]) -> str:
        try:
            given = shlex.split(match["arguments"])
            options = parse(parser, given)
        except ValueError as error:  # quotes that do not close, or an option that is none
            raise GateError(f"{str(document)!r} has the command {match['begin']!r}, which cannot be read: {error}") from error
        return f"{match['begin']}\n\n{make(given, options)}\n\n<!-- end -->"

    changed = tables.sub(made, text)
    with replacing(document) as partial:
        partial.write_bytes(changed.encode())
