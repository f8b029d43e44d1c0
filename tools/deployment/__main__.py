"""Try how exports load and what runs them: ``python -m tools.deployment``.

Tiny random models are tried on this machine with the installed packages. The results are ``docs/data/deployment.csv`` and the
counts in ``docs/reference/deployment.md``. With names of tables, only these are tried again.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from tools.coverage.__main__ import quiet, read, replace_between
from tools.deployment import gguf, routes, runtimes, speed, vllm
from tools.deployment.cells import Row

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "data" / "deployment.csv", DOCS / "reference" / "deployment.md"
TABLES = ("routes", "runtimes", "gguf", "vllm", "speed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the tables; return 1 if a route gives other outputs than the gated model."""
    parser = argparse.ArgumentParser(prog="python -m tools.deployment", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(TABLES)}")
    parser.add_argument("--vllm_python", metavar="PATH", help="the Python, 3.11 or later, of an environment with vLLM")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.tables) - set(TABLES)):
        parser.error(f"{unknown[0]!r} is no table; expected some of {', '.join(TABLES)}")
    quiet()
    chosen = options.tables or TABLES
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.reader(file) if row[0] in TABLES and row[0] not in chosen]
    made = [row for table in chosen for row in _rows(table, options.vllm_python)]
    with DATA.open("w", encoding="utf-8", newline="") as file:
        ordered = sorted([*rows, *map(list, made)], key=lambda row: TABLES.index(row[0]))
        csv.writer(file, lineterminator="\n").writerows([("table", "row", "column", "result"), *ordered])
    replace_between(PAGE, "versions", [_versions()])
    write_counts()
    return int(any(row[3].startswith("FAILED") for row in made))


def _rows(table: str, python: str | None) -> Iterator[Row]:
    takes_vllm = {"vllm": vllm.rows, "speed": speed.rows}
    without = {"routes": routes.rows, "runtimes": runtimes.rows, "gguf": gguf.rows}
    for row in takes_vllm[table](python) if table in takes_vllm else without[table]():
        print(*row, sep="\t", flush=True)
        yield row


def _versions() -> str:
    names = dict.fromkeys(["transformers", "torch", *(name for _, *needed in runtimes.RUNTIMES.values() for name in needed)])
    used = [name for name in (*names, *gguf.PACKAGES) if importlib.util.find_spec(name)]
    return f"Installed for the last run: {', '.join(f'{name} {metadata.version(name)}' for name in used)}."


def write_counts() -> None:
    """Write the counts of all tables and the speeds between the marks in ``docs/reference/deployment.md``."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    cells: dict[str, dict[str, str]] = {}
    for row in read(DATA):
        if row["table"] == "speed":
            cells.setdefault(row["row"], {})[row["column"]] = row["result"].partition(":")[0]
        else:
            columns = counts.setdefault(row["table"], {})
            columns.setdefault(row["column"], Counter()).update([re.split("[:,]", row["result"])[0]])
    lines = ["| table | `yes`, of those that were tried |", "| --- | --- |"]
    for table, found in counts.items():
        tried = [f"{column}: {count['yes']} of {count['yes'] + count['no']}" for column, count in found.items()]
        lines.append(f"| `{table}` | {'; '.join(tried)} |")
    for header in dict.fromkeys(tuple(speeds) for speeds in cells.values()):
        rows = [(name, *speeds.values()) for name, speeds in cells.items() if tuple(speeds) == header]
        lines += ["", *(f"| {' | '.join(line)} |" for line in (("`speed`", *header), ["---"] * (len(header) + 1), *rows))]
    replace_between(PAGE, "counts", lines)


if __name__ == "__main__":
    sys.exit(main())
