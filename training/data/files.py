"""Local csv, tsv, jsonl and parquet files as tables, gzip included. Nothing here loads PyTorch, so that a wrong file is told
at once."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pyarrow
import pyarrow.parquet

from gates.errors import GateError
from training.config.data import SentenceFiles

# How large a table is that a file holds, found out without reading it as one.

MOST_COLUMNS = 1000
UNPACKED, RATIO = 64_000_000, 200
"""Bytes that a packed file may hold in any case, and how many times its own size; text is packed to a third or a tenth."""
LIKE_KEYS = re.compile(rb'"((?:[^"\\]|\\.)*)"\s*:')
"""All keys of JSON text, and perhaps more: those within values, and what is quoted in a text."""
ROWS_AT_ONCE = 1024


def count_keys(path: Path) -> int:
    """Columns of a jsonl file, which are the keys of all its lines together; counted no further than beyond all limits."""
    found: set[bytes] = set()
    before: list[bytes] = []
    for line in _lines(path):
        if (keys := LIKE_KEYS.findall(line)) != before:
            before = keys
            found.update(keys)
        if len(found) > MOST_COLUMNS:
            return _count_exactly(path)
    return len(found)


def _count_exactly(path: Path) -> int:
    keys: set[str] = set()
    for line in _lines(path):
        content = json.loads(line) if line.strip() else {}
        keys |= content.keys() if isinstance(content, dict) else set()
        if len(keys) > MOST_COLUMNS:
            break
    return len(keys)


def _lines(path: Path) -> Iterator[bytes]:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rb") as stream:
        yield from stream


def check_unpacked(path: Path) -> None:
    """Raises :class:`GateError` for a parquet file whose table takes many times its size, as one does whose columns hold one
    value a million times; not all of it is read."""
    most, size = max(UNPACKED, RATIO * path.stat().st_size), 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            size += batch.nbytes
            if size > most:
                name = f"the data file {str(path)!r}"
                raise GateError(f"{name} unpacks to more than {RATIO} times its size, as no text does; check what it is")


# Header lines of files whose columns were named by hand, as those of a file without one are: such a line would become an
# example, and its last word a class.

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


FORMATS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".jsonl": "json", ".parquet": "parquet"}
LONGEST = 1_000_000
"""Bytes of a line and characters of a text, which a tokenizer takes a second for; models read some thousands."""
MOST_ROWS = 50_000_000
QUOTED = re.compile(r'[^"]*(?:""[^"]*)*("?)')
"""The text behind an opening quotation mark, and the closing one if it is there."""


def read_table(
    file: str, columns: list[str] | None = None, quoting: bool | None = None, *, checked: bool = True
) -> pd.DataFrame:
    """Read one local file by its ending.

    Args:
        file: ``.csv``, ``.tsv``, ``.txt`` (as tsv), ``.jsonl`` or ``.parquet``, each also with ``.gz``.
        columns: names of the columns when there is no header line.
        quoting: whether csv fields may be quoted; by default yes for csv and no for tsv.
        checked: whether a first line that looks like a header is refused where the columns are named.

    Raises:
        GateError: missing, empty, of unknown format, not UTF-8, or not what its ending says.
    """
    path = Path(file)
    check_there(file)
    ending = _ending(path)
    kind = FORMATS.get(ending.lower())
    if kind is None:
        raise GateError(
            f"the data file {file!r} has the ending {ending!r}; expected one of {', '.join(FORMATS)}, or one of these with .gz"
        )
    check_text(path, kind)
    try:
        check_columns(path, kind, quoting)
        if kind == "parquet":
            table = pd.read_parquet(path)
        elif kind == "json":
            table = pd.read_json(path, lines=True, dtype=False, encoding="utf-8")
        else:
            table = _read_columns(path, columns, quoting)
        check_cells(table, path)
        pyarrow.Table.from_pandas(table, preserve_index=False)  # raises for values of several kinds in a column
        return check_header(table, path, columns) if checked else table
    except (GateError, PermissionError):  # which say what is wrong
        raise
    except Exception as error:  # pandas and arrow raise many kinds for damaged files
        raise GateError(f"the data file {file!r} cannot be read as {kind}: {str(error).strip().splitlines()[0]}") from error


def check_there(file: str, split: str = "data") -> None:
    """Raises :class:`GateError` for a file that does not exist, and for a pipe, which can be read but once."""
    if not os.path.exists(file):
        raise GateError(f"the {split} file {file!r} does not exist; check the path")
    if not os.path.isfile(file):
        raise GateError(f"the {split} file {file!r} is no regular file, and it is read more than once; make a file of it")


def _read_columns(path: Path, columns: list[str] | None, quoting: bool | None) -> pd.DataFrame:
    """A csv or tsv file as texts; see :func:`read_table`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", pd.errors.ParserWarning)
        separator, quotes = _dialect(path, quoting)
        table = pd.read_csv(
            path,
            sep=separator,
            quoting=quotes,
            dtype=str,
            keep_default_na=False,
            names=columns,
            header=0 if columns is None else None,
            index_col=False,
            encoding="utf-8",
        )
    width = len(table.columns)
    if width > 1 and (table.iloc[:, -1] == "").any():  # pandas fills short rows up
        for line, row in _rows(path, separator, quotes):
            if len(row) < width and "".join(row).strip():
                raise GateError(
                    f"line {line} of {str(path)!r} has {len(row)} fields and the file {width} columns; expected a field for "
                    "each column, and --data.quoting true where quoted texts have line breaks"
                )
    if caught:  # rows longer than the header, whose ends pandas has cut
        for line, row in _rows(path, separator, quotes):
            if any(row[width:]):
                raise GateError(
                    f"line {line} of {str(path)!r} has {len(row)} fields and the file {width} columns; name every column in "
                    "the header or with --data.columns, and see that no text contains the separator"
                )
    return table


def choose_columns(split: str, columns: list[str], options: SentenceFiles) -> dict[str, str]:
    """The file's names of the columns ``text``, ``label`` and, if there is one, ``pair``.

    Where the options name no column, it is the one with a usual name, or what is left of two columns.

    Raises:
        GateError: for a column that is not there, or if it is not sure which one is meant.
    """
    wanted = {"text": options.text_column, "label": options.label_column, "pair": options.pair_column}
    usual = {"text": TEXT_COLUMNS, "label": LABEL_COLUMNS}
    found = {name: column for name, column in wanted.items() if column is not None}
    for name, names in usual.items():
        if name not in found:
            near = [column for column in columns if column.lower() in names and column not in found.values()]
            if len(near) == 1:
                found[name] = near[0]
            elif not near and found.get("pair", "").lower() in names:  # which is told below
                found[name] = found["pair"]
    left = [column for column in columns if column not in found.values()]
    for name in usual:
        if name not in found and len(left) == 1 and len(columns) == 2:
            found[name] = left[0]
    listed = ", ".join(map(repr, columns))
    for column in found.values():
        if column not in columns:
            raise GateError(
                f"the {split} split has no column {column!r}; it has {listed}. Set --data.text_column, --data.pair_column or "
                "--data.label_column, or --data.columns if there is no header"
            )
    if len(set(found.values())) < len(found):
        raise GateError(
            f"the {split} split has one column in two roles ({', '.join(map(repr, found.values()))}); name different ones"
        )
    for name, what in {"text": "the sentence", "label": "the class"}.items():
        if name not in found:
            raise GateError(
                f"the {split} split has the columns {listed}, and it is not clear which one is {what}; give "
                f"--data.{name}_column, or --data.columns if there is no header"
            )
    return found


def refuse_blank_lines(file: str) -> None:
    """Raises :class:`GateError` for a csv or tsv file with blank lines between its rows, which :func:`read_table` passes over:
    in parallel text they may stand for a sentence that got lost. At the end they do no harm; other kinds of files have none."""
    path = Path(file)
    if FORMATS.get(_ending(path).lower()) != "csv":
        return
    blank = None
    for line, row in _rows(path, *_dialect(path, None)):
        if len(row) < 2 and not "".join(row).strip():
            blank = blank or line
        elif blank is not None:
            raise GateError(f"line {blank} of {file!r} is blank; remove it, or give it both sides")


def refuse_broken_quotes(file: str, quoting: bool | None) -> None:
    """Raise :class:`GateError` for a tsv file that is written as quoted csv and has a line break in quotes.

    Without quoting, each half of such a text can be a whole row. A file is written so if every quotation mark in it encloses a
    field or is doubled in one; texts with quotation marks of their own are not.

    Args:
        file: A data file of any kind.
        quoting: Whether the file is read with quoting. A value that is not None is taken as it is.
    """
    path = Path(file)
    opened: int | None = None
    broken: int | None = None
    if quoting is not None or FORMATS.get(_ending(path).lower()) != "csv" or _ending(path).lower() == ".csv":
        return
    for line, row in _rows(path, *_dialect(path, None)):
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
            f"line {broken} of {file!r} begins a field in quotation marks, which ends in a later line; set "
            "--data.quoting true, or false if every line is an example"
        )


def _ending(path: Path) -> str:
    """What a file is, by its name without ``.gz``."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _dialect(path: Path, quoting: bool | None) -> tuple[str, Literal[0, 3]]:
    """The separator, and csv's constant for quoting."""
    comma = _ending(path) == ".csv"
    return "," if comma else "\t", csv.QUOTE_MINIMAL if (comma if quoting is None else quoting) else csv.QUOTE_NONE


def _rows(path: Path, separator: str, quotes: Literal[0, 3]) -> Iterator[tuple[int, list[str]]]:
    """The fields of every row, blank ones included, with the number of the line where it ends."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as stream:
        if quotes == csv.QUOTE_NONE:  # csv's own reader refuses texts of 131,073 characters
            yield from ((number, line.rstrip("\r\n").split(separator)) for number, line in enumerate(stream, start=1))
            return
        reader = csv.reader(stream, delimiter=separator, quoting=quotes)
        try:
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as error:
            raise GateError(f"the data file {str(path)!r} cannot be read (line {reader.line_num}): {error}") from error


def check_text(path: Path, kind: str) -> None:
    """Empty files, files that are not UTF-8 text, and files beyond all limits, named before a reader stumbles over them.

    Args:
        path: of the file.
        kind: ``parquet``, of which only the size is looked at, or a kind of text.
    """
    name, packed = f"the data file {str(path)!r}", path.suffix == ".gz"
    most = max(UNPACKED, RATIO * path.stat().st_size)
    number, size, empty = 0, 0, True
    try:
        with (gzip.open if packed else open)(path, "rb") as stream:
            while number < MOST_ROWS and (line := stream.readline(LONGEST + 1)):
                number, size, empty = number + 1, size + len(line), empty and not line.strip()
                if packed and size > most:
                    raise GateError(f"{name} unpacks to more than {RATIO} times its size, as no text does; check what it is")
                if kind != "parquet":
                    check_line(line, name, number)
            if number == MOST_ROWS and stream.readline(1):
                raise GateError(f"{name} has more than {MOST_ROWS:,} lines; give a part of it")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise GateError(f"{name} is not a complete gzip file: {error}") from error
    if empty:
        raise GateError(f"{name} is empty; expected at least one example")


def check_line(line: bytes, file: str, number: int) -> None:
    """Raises :class:`GateError` for a line that is no UTF-8 text, or longer than any text.

    Args:
        line: of a file, or its beginning.
        file: as an error calls it.
        number: of the line.
    """
    if len(line) > LONGEST:
        raise GateError(f"{file} has more than {LONGEST:,} bytes in line {number}; expected one example on each line")
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GateError(f"{file} is not UTF-8 (line {number}); convert it, for example with iconv") from error
    if b"\0" in line:
        raise GateError(
            f"{file} has NUL characters (line {number}), as UTF-16 has; convert it to UTF-8, for example with iconv"
        )


def check_columns(path: Path, kind: str, quoting: bool | None) -> None:
    """Raises :class:`GateError` for a table with more columns or rows than any data set has, or one that is far larger than its
    file."""
    rows, columns = 0, 0
    if kind == "csv":
        separator, quotes = _dialect(path, quoting)
        columns = len(next((row for _, row in _rows(path, separator, quotes)), []))
    elif kind == "json":
        columns = count_keys(path)
    elif kind == "parquet":
        described = pyarrow.parquet.read_metadata(path)
        rows, columns = described.num_rows, described.num_columns
    for count, most, what in ((columns, MOST_COLUMNS, "columns"), (rows, MOST_ROWS, "rows")):
        if count > most:
            raise GateError(f"the data file {str(path)!r} has {count:,} {what}; expected at most {most:,}")
    if kind == "parquet":
        check_unpacked(path)


def check_cells(table: pd.DataFrame, path: Path) -> None:
    """Raises :class:`GateError` for a text that is too long, as one is behind a quotation mark that nothing closes, and for
    columns that mix true and false with numbers, which would become one value."""
    for name in table:
        if table[name].dtype == object and bool in (kinds := set(map(type, table[name].dropna()))) and len(kinds) > 1:
            raise GateError(f"{str(name)!r} of {str(path)!r} has true or false and other values; write all of one kind")
        if pd.api.types.is_string_dtype(table[name]) and (lengths := table[name].str.len()).max() > LONGEST:
            row = int(lengths.argmax())
            raise GateError(
                f"{str(name)!r} of example {row + 1} of {str(path)!r} has {int(lengths[row]):,} characters; expected a text. "
                "See that its quotation marks are closed, or set --data.quoting false"
            )


def no_padding(tokenizer: str) -> str:
    """What to say of a tokenizer that cannot fill up batches."""
    return (
        f"the tokenizer of {tokenizer!r} has no padding token, nor an end or unknown token to take for it; give another with "
        "--data.tokenizer, or set pad_token in its tokenizer_config.json"
    )
