"""Header lines of files whose columns were named by hand, as those of a file without one are: such a line would become an
example, and its last word a class."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pandas as pd

from gates.errors import GateError

TEXT_COLUMNS, LABEL_COLUMNS = ("sentence", "text"), ("label", "labels", "class")
"""What the columns of sentence and class are called, where nobody says."""
ENOUGH_ROWS, FEW = 20, 5
"""Rows of a file, and rows for each value of a column, from which on a value that occurs once stands out."""


def check_header(table: pd.DataFrame, path: Path, columns: list[str] | None) -> pd.DataFrame:
    """The table, if its columns were not named by hand although the file has a header line.

    Raises:
        GateError: if the first row says what the columns are called.
    """
    if columns is not None and len(table) and _is_header(table, columns):
        raise GateError(has_header(path, table))
    return table


def check_label_headers(tables: Mapping[str, pd.DataFrame], labels: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Whether the first row of any split is a header, by its class.

    Args:
        tables: of the splits, whose columns were named by hand.
        labels: column of the class in each.
        files: that they were read from.

    Raises:
        GateError: if the first class of a file is the only one that occurs once, or two files begin with the same row and its
            class occurs nowhere else.
    """
    for split, table in tables.items():
        if table[labels[split]].nunique() > 2 and _is_alone_first(table[labels[split]]):
            raise GateError(has_header(Path(files[split]), table))
    for one, other in combinations(tables, 2):
        first, second = tables[one].iloc[0], tables[other].iloc[0]
        if Path(files[one]).resolve() == Path(files[other]).resolve() or list(first) != list(second):
            continue
        if all((tables[split][labels[split]] == first[labels[one]]).sum() == 1 for split in (one, other)):
            raise GateError(has_header(Path(files[one]), tables[one]))


def has_header(path: Path, table: pd.DataFrame) -> str:
    """What to say of a file whose first row is a header."""
    return (
        f"the first line of {str(path)!r} looks like a header ({', '.join(map(repr, table.iloc[0]))}), but --data.columns "
        "names the columns of a file without one; leave out --data.columns (--data.columns null where a configuration has it), "
        "take the line out of the file, or give --data.check_header false if it is an example"
    )


def _is_header(table: pd.DataFrame, columns: list[str]) -> bool:
    """Whether the first row has one of the given or the usual names, words in a column of numbers, or a value that no other row
    has in a column of a few values."""
    for column, name in zip(table, columns, strict=False):
        values, others = table[column], table[column].iloc[1:]
        is_name = _name(values.iloc[0]) in {name.lower(), *TEXT_COLUMNS, *LABEL_COLUMNS}
        if is_name and _name(values.iloc[0]) not in set(map(_name, others)):  # elsewhere it is a class or a text
            return True
        if not _is_number(values.iloc[:1]) and len(others) and _is_number(others.iloc[:ENOUGH_ROWS]) and _is_number(others):
            return True
        if len(table) >= ENOUGH_ROWS and _is_alone_first(values) and values.nunique() <= len(table) / FEW:
            return True
    return False


def _name(value: object) -> str:
    """A value as a column may be called."""
    return str(value).strip().strip("\"'").lower()


def _is_alone_first(values: pd.Series) -> bool:
    """Whether the first value occurs nowhere else, and is the only one of which that is true."""
    return bool((values == values.iloc[0]).sum() == 1 and (values.value_counts() == 1).sum() == 1)


def _is_number(values: pd.Series) -> bool:
    """Whether all values are numbers."""
    return bool(pd.to_numeric(values, errors="coerce").notna().all())
