"""Local csv, tsv, jsonl and parquet files as tables, gzip included. Nothing here loads PyTorch, so a wrong file is refused
at once."""

from __future__ import annotations

import csv
import gzip
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow

from gates.errors import GateError
from training.config.data import SentenceFiles, Text

FORMATS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".jsonl": "json", ".parquet": "parquet"}
TEXT_COLUMNS, LABEL_COLUMNS = ("sentence", "text"), ("label", "labels", "class")
"""The usual names of the columns of sentence and class."""
LONGEST = 1_000_000
"""The most bytes of a line and characters of a text: a tokenizer takes a second for them, and models read some thousands."""
QUOTED = re.compile(r'[^"]*(?:""[^"]*)*("?)')
"""The text behind an opening quotation mark, and the closing one if it is there."""


def read_table(
    file: str,
    columns: list[str] | None = None,
    quoting: bool | None = None,
    *,
    checked: bool = True,
    may_skip: bool = True,
) -> pd.DataFrame:
    """Read one local file by its ending.

    The name of the index is ``line`` and its values are the numbers of lines in csv and tsv files. In others it is ``example``.

    Args:
        file: A ``.csv``, ``.tsv``, ``.txt`` (read as tsv), ``.jsonl`` or ``.parquet`` file, each also with ``.gz``.
        quoting: Whether csv fields may be quoted. Default: yes for csv and no for tsv.
        checked: Whether to refuse a first line that looks like a header although ``columns`` are given.
        may_skip: Whether to skip blank lines of csv and tsv files between other lines.
    """
    path = Path(file)
    check_there(file)
    ending = ending_of(path)
    kind = FORMATS.get(ending.lower())
    if kind is None:
        raise GateError(
            f"the data file {file!r} has the ending {ending!r}; expected one of {', '.join(FORMATS)}, or one of these with .gz"
        )
    if kind != "parquet":
        check_text(file)
    try:
        if kind == "csv":
            table = _read_lines(path, columns, quoting, may_skip=may_skip)
        else:
            table = (
                pd.read_parquet(path) if kind == "parquet" else pd.read_json(path, lines=True, dtype=False, encoding="utf-8")
            )
            table.index = pd.RangeIndex(1, len(table) + 1, name="example")
        _check_cells(table, path)
        pyarrow.Table.from_pandas(table, preserve_index=False)  # raises for values of several kinds in a column
    except (GateError, PermissionError):
        raise
    except Exception as error:  # pandas and arrow raise many kinds for damaged files
        raise GateError(f"the data file {file!r} cannot be read as {kind}: {str(error).strip().splitlines()[0]}") from error
    if checked and columns is not None and len(table) and _begins_with_header(table, columns):
        raise GateError(_has_header(path, table))
    return table


def _read_lines(path: Path, columns: list[str] | None, quoting: bool | None, *, may_skip: bool) -> pd.DataFrame:
    separator, quotes = _dialect(path, quoting)
    header, blank, lines, rows = columns, None, list[int](), list[list[str]]()
    for line, row in _rows(path, separator, quotes):
        if len(row) < 2 and not "".join(row).strip():
            blank = blank or line
            continue
        if blank and not may_skip:
            raise GateError(f"line {blank} of {str(path)!r} is blank; remove it, or give it both sides")
        if header is columns and not lines:  # the first row
            _refuse_other_separator(path, separator, row, columns)
        if header is None:
            header = row
            continue
        width = len(header)
        if len(row) < width or any(row[width:]):
            mend = "name every column in the header or with --data.columns, and see that no text contains the separator"
            if len(row) < width:
                mend = "expected a field for each column, and --data.quoting true where quoted texts have line breaks"
            raise GateError(f"line {line} of {str(path)!r} has {len(row)} fields and the file {width} columns; {mend}")
        lines.append(line)
        rows.append(row[:width])
    return pd.DataFrame(rows, columns=header, index=pd.Index(lines, name="line"), dtype=str)


def check_there(file: str, split: str = "data") -> None:
    """Raise :class:`GateError` for a file that does not exist, and for a pipe, which cannot be read twice."""
    if not os.path.exists(file):
        raise GateError(f"the {split} file {file!r} does not exist; check the path")
    if not os.path.isfile(file):
        raise GateError(f"the {split} file {file!r} is not a regular file but is read more than once; save it as a file")


def _refuse_other_separator(path: Path, separator: str, row: Sequence[str], columns: list[str] | None) -> None:
    """Raise :class:`GateError` if the first line is one field with another usual separator in it."""
    names = {",": "commas", "\t": "tabs", ";": "semicolons"}
    others = [mark for mark in names if mark in row[0]] if len(row) == 1 else []
    if others and (columns is None or len(columns) > 1):
        raise GateError(
            f"the first line of {str(path)!r} is {row[0][:60]!r}, with {names[others[0]]} between its columns; expected "
            f"{names[separator]} in a {ending_of(path)} file; save it with {names[separator]}"
        )


def refuse_empty_labels(file: str, table: pd.DataFrame, column: str) -> None:
    """Raise :class:`GateError` for an example without a label."""
    empty = (table[column].map(str).str.strip() == "").to_numpy()
    if empty.any():
        where = f"{table.index.name} {table.index[int(empty.argmax())]} of {file!r}"
        raise GateError(f"{where} has an empty label in the column {column!r}; give every example a label")


def find_column(where: str, role: str, columns: Sequence[str], given: str | None, usual: Collection[str]) -> str:
    """Return the column with the given name, or without one the only column with a usual name.

    Args:
        role: The option that names the column, without ``_column``.
    """
    fitting = [column for column in columns if column == given or (given is None and column.lower() in usual)]
    if len(fitting) == 1:
        return fitting[0]
    which = f"no column {given!r}" if given is not None else "several columns" if fitting else "no column"
    listed = ", ".join(map(repr, columns))
    raise GateError(f"{where} has {which} for the {role}; it has {listed}. Give --data.{role}_column, the same for all splits")


def choose_columns(split: str, columns: list[str], options: SentenceFiles) -> dict[str, str]:
    """Return the file's names of the columns ``text``, ``label`` and, if there is one, ``pair``.

    Without an option, the column is the one with a usual name, or the remaining one of two columns.
    """
    wanted = {"text": options.text_column, "label": options.label_column, "pair": options.pair_column}
    found = {name: column for name, column in wanted.items() if column is not None}
    usual = {"text": TEXT_COLUMNS} | ({"label": LABEL_COLUMNS} if options.has_labels else {})
    for name, names in usual.items():
        if name not in found:
            near = [column for column in columns if column.lower() in names and column not in found.values()]
            if len(near) == 1:
                found[name] = near[0]
    left = [column for column in columns if column not in found.values()]
    for name in usual:
        if name not in found and len(left) == 1 and len(columns) == len(usual):
            found[name] = left[0]
    listed = ", ".join(map(repr, columns))
    if missing := [column for column in found.values() if column not in columns]:
        raise GateError(
            f"the {split} split has no column {missing[0]!r}; it has {listed}. Set --data.text_column, --data.pair_column or "
            "--data.label_column, or --data.columns if there is no header"
        )
    if len(set(found.values())) < len(found):
        raise GateError(
            f"the {split} split has one column in two roles ({', '.join(map(repr, found.values()))}); name different ones"
        )
    for name, what in {"text": "the sentence", "label": "the class"}.items():
        if name in usual and name not in found:
            can_label = name == "label" and isinstance(options, Text)
            without = ", or --data.unlabelled true for a fine-tuned model" if can_label else ""
            raise GateError(
                f"the {split} split has the columns {listed}, and it is not clear which one is {what}; give "
                f"--data.{name}_column, or --data.columns if there is no header{without}"
            )
    return found


# Header lines of files whose columns were given by hand. Such a line would become an example, and its last word a class.


def check_label_headers(tables: Mapping[str, pd.DataFrame], labels: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Check by its class whether the first row of any split is a header."""
    first_rows, times = {}, {}
    for split, table in tables.items():
        classes = table[labels[split]]
        first_rows[split], times[split] = list(table.iloc[0]), int((classes == classes.iloc[0]).sum())
        alone = (classes.value_counts() == 1).sum() == times[split] == 1  # no other class occurs once
        if classes.nunique() > 2 and alone:
            raise GateError(_has_header(Path(files[split]), table))
    for one, other in combinations(tables, 2):
        is_same_file = Path(files[one]).resolve() == Path(files[other]).resolve()
        if not is_same_file and first_rows[one] == first_rows[other] and times[one] == times[other] == 1:
            raise GateError(_has_header(Path(files[one]), tables[one]))


def _has_header(path: Path, table: pd.DataFrame) -> str:
    return (
        f"the first line of {str(path)!r} looks like a header ({', '.join(map(repr, table.iloc[0]))}), but --data.columns "
        "is for files without one; remove the option (--data.columns null overrides a configuration), remove the line, or "
        "give --data.check_header false if the line is an example"
    )


def _begins_with_header(table: pd.DataFrame, columns: list[str]) -> bool:
    """Return whether the first row has a given or usual name of a column, or a word above numbers."""

    def name(value: object) -> str:
        return str(value).strip().strip("\"'").lower()

    for column, given in zip(table, columns, strict=False):
        first, others = table[column].iloc[0], table[column].iloc[1:]
        if name(first) in {given.lower(), *TEXT_COLUMNS, *LABEL_COLUMNS} and name(first) not in set(map(name, others)):
            return True  # a value that occurs again is a class or a text
        if len(others) and not _are_numbers(table[column].iloc[:1]) and _are_numbers(others.iloc[:20]) and _are_numbers(others):
            return True
    return False


def _are_numbers(values: pd.Series) -> bool:
    return bool(pd.to_numeric(values, errors="coerce").notna().all())


def refuse_broken_quotes(file: str, table: pd.DataFrame, quoting: bool | None) -> None:
    """Raise :class:`GateError` for a tsv file that is written as quoted csv and has a line break in quotes.

    Without quoting, each half of such a text can be a whole row. A file counts as quoted csv if every quotation mark in it
    encloses a field or is doubled inside one. ``quoting`` states how the file is read; only None is checked.
    """
    opened: int | None = None
    broken: int | None = None
    if quoting is not None or table.index.name != "line" or _dialect(Path(file), None)[1] != csv.QUOTE_NONE:
        return
    for line, *row in table.itertuples(name=None):
        for field in row:
            if '"' not in field:
                continue
            inside = field if opened else field[1:]
            closes = QUOTED.fullmatch(inside)
            if (not opened and field[0] != '"') or not closes:
                return
            if closes[1]:
                broken = broken or (opened if opened != line else None)
                opened = None
            else:
                opened = opened or line
    if broken and not opened:
        raise GateError(
            f"line {broken} of {file!r} begins a quoted field that ends in a later line; set --data.quoting true, or false if "
            "every line is an example"
        )


def ending_of(file: str | Path) -> str:
    """Return the ending of a file without ``.gz``, such as ``.csv``."""
    return Path(str(file).removesuffix(".gz")).suffix


def _dialect(path: Path, quoting: bool | None) -> tuple[str, Literal[0, 3]]:
    """Return the separator, and csv's constant for quoting."""
    comma = ending_of(path) == ".csv"
    return "," if comma else "\t", csv.QUOTE_MINIMAL if (comma if quoting is None else quoting) else csv.QUOTE_NONE


def open_text(file: str | Path, newline: str = "\n") -> Any:
    """Open a UTF-8 text file, ``.gz`` too, without a byte order mark."""
    return (gzip.open if str(file).endswith(".gz") else open)(file, "rt", encoding="utf-8-sig", newline=newline)


def _rows(path: Path, separator: str, quotes: Literal[0, 3]) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of every row, blank ones included, with the number of the line where it ends."""
    with open_text(path, newline="") as stream:
        if quotes == csv.QUOTE_NONE:
            yield from ((number, line.rstrip("\r\n").split(separator)) for number, line in enumerate(stream, start=1))
            return
        csv.field_size_limit(2**31 - 1)  # :func:`_check_cells` has a lower limit
        end = ["\0", "\0"]  # which no text has, see :func:`check_text`
        reader = csv.reader(chain(stream, [separator.join(end)]), delimiter=separator, quoting=quotes)
        for row in reader:
            if row == end:
                return
            if row and row[-1].endswith("\0"):
                raise GateError(f"{str(path)!r} ends within quotation marks; close them, or set --data.quoting false")
            yield reader.line_num, row


def check_text(file: str) -> None:
    """Check that a file, ``.gz`` too, is not empty and that its lines are UTF-8 text of at most ``LONGEST`` bytes."""
    name, number, empty = f"the data file {file!r}", 0, True
    try:
        with (gzip.open if file.endswith(".gz") else open)(file, "rb") as stream:
            while line := stream.readline(LONGEST + 1):
                number, empty = number + 1, empty and not line.strip()
                _check_line(line, name, number)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise GateError(f"{name} is not a complete gzip file: {error}") from error
    if empty:
        raise GateError(f"{name} is empty; expected at least one example")


def _check_line(line: bytes, name: str, number: int) -> None:
    if len(line) > LONGEST:
        raise GateError(f"{name} has more than {LONGEST:,} bytes in line {number}; expected one example on each line")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GateError(f"{name} is not UTF-8 (line {number}); convert it, for example with iconv") from error
    if b"\0" in line:
        raise GateError(
            f"{name} has NUL characters (line {number}), as UTF-16 has; convert it to UTF-8, for example with iconv"
        )


def _check_cells(table: pd.DataFrame, path: Path) -> None:
    """Refuse texts that are too long, and columns that mix booleans with other values.

    An unclosed quotation mark makes a long text. pandas would make one value of ``true`` and 1.
    """
    for name in table:
        if table[name].dtype == object and bool in (kinds := set(map(type, table[name].dropna()))) and len(kinds) > 1:
            raise GateError(f"{str(name)!r} of {str(path)!r} mixes true or false with other values; write one kind")
        if pd.api.types.is_string_dtype(table[name]) and (lengths := table[name].str.len()).max() > LONGEST:
            where = f"{table.index.name} {lengths.idxmax()} of {str(path)!r}"
            raise GateError(
                f"{str(name)!r} of {where} has {int(lengths.max()):,} characters; expected at most {LONGEST:,}; close its "
                "quotation marks, or set --data.quoting false"
            )
