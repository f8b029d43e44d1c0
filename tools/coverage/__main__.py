"""Check what works for which architecture and model type: ``python -m tools.coverage``.

The results are ``docs/data/architectures.csv``, ``docs/data/coverage.csv`` and the counts in
``docs/reference/coverage.md``. With names, only these architectures and model types are checked, and nothing is written.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from gates.errors import first_line
from tests.gates.architecture_checks import COLUMNS, ArchitectureChecks
from tools.coverage import architectures as zoo
from tools.coverage.every_type import REMOVED, TypeRow, check_type
from tools.coverage.tiny import model_types

DOCS = Path(__file__).parents[2] / "docs"
ARCHITECTURES, TYPES, PAGE = (
    DOCS / "data" / "architectures.csv",
    DOCS / "data" / "coverage.csv",
    DOCS / "reference" / "coverage.md",
)
MEMORY = 5 * 2**30
MEANINGS = {
    REMOVED: "gates of one change no bit, a closed head is a block of zeros in its output projection, scores are the slopes of "
    "the loss; heads were removed, saved, loaded again, and the outputs are those of the gated model",
    "gated": "the same except for removing heads, which is refused or did not work, with the reason",
    "scored in part": "gates are as exact; the model itself stops gradients on their way, and scores leave that way out",
    "refused": "the library refuses it with the reason",
    "no inputs": "no inputs are known on which all of its attention runs, so nothing was checked",
    "no attention": "the tiny model made of its defaults has no attention",
    "not built": "no tiny model could be made of it here",
    "stopped": "it took more time or memory than it may",
    "FAILED": "a check did not pass",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.coverage", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="an architecture such as Llama, or a model type such as llama")
    names = parser.parse_args(arguments).names
    types = model_types()
    if unknown := sorted(set(names) - set(zoo.BY_NAME) - set(types)):
        parser.error(f"{unknown[0]!r} is neither an architecture nor a model type of Transformers")
    quiet()
    rows = [check_architecture(row) for row in zoo.ARCHITECTURES if not names or row.name in names]
    seen = list(check_types([name for name in types if not names or name in names]))
    if not names:
        for path, header, lines in (
            (ARCHITECTURES, ("architecture", *COLUMNS), rows),
            (TYPES, [field.name for field in fields(TypeRow)], map(astuple, seen)),
        ):
            with path.open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([header, *lines])
        used = f"Made with Transformers {transformers.__version__} and PyTorch {torch.__version__}."
        replace_between(PAGE, "versions", [used])
        write_counts()
    return int(any("FAILED" in "".join(row) for row in rows) or any(row.outcome == "FAILED" for row in seen))


def quiet() -> None:
    """Silence warnings and Transformers' own messages."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def check_architecture(architecture: zoo.Architecture) -> tuple[str, ...]:
    """Run all checks of an architecture; return its line of the table."""
    checks = ArchitectureChecks(architecture)
    row = (architecture.name, *(_cell(checks, column) for column in COLUMNS))
    print(*row, sep="\t", flush=True)
    return row


def _cell(checks: ArchitectureChecks, column: str) -> str:
    try:
        return checks.run(column)
    except Exception as error:  # the other cells must not be lost
        return f"FAILED: {type(error).__name__}: {first_line(error)}"


def check_types(types: Sequence[str], seconds: float = 180.0) -> Iterable[TypeRow]:
    """Check model types, each in a process of its own: one that hangs or needs too much memory ends alone."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tools.coverage.every_type"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for number, row in enumerate(pool.map(lambda name: _in_process(server, name, seconds), types), start=1):
            print(f"{number}/{len(types)}", *astuple(row), sep="\t", flush=True)
            yield row


def _in_process(server: Any, name: str, seconds: float) -> TypeRow:
    ours, theirs = server.Pipe(duplex=False)
    process = server.Process(target=_check_in_child, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            row: TypeRow = ours.recv()
            return row
        reason = f"it took more than {seconds:.0f} seconds"
    except EOFError:
        process.join()
        reason = f"its process ended with {process.exitcode}, as where memory is short"
    finally:
        process.kill()
        process.join()
        ours.close()
    return TypeRow(name, "stopped", reason=reason)


def _check_in_child(name: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    quiet()
    torch.set_num_threads(1)
    try:
        row = check_type(name)
    except MemoryError:
        row = TypeRow(name, "stopped", reason=f"it needs more than {MEMORY // 2**30} GiB")
    except Exception as error:  # an error that no check foresees is a result too
        row = TypeRow(name, "FAILED", reason=f"{type(error).__name__}: {first_line(error)}")
    pipe.send(row)
    pipe.close()


def write_counts() -> None:
    """Write the counts of both tables between the marks in ``docs/reference/coverage.md``."""
    replace_between(PAGE, "architectures", _about_architectures())
    replace_between(PAGE, "types", _about_types())


def replace_between(page: Path, mark: str, lines: Sequence[str]) -> None:
    """Replace the lines of a page between ``<!-- mark -->`` and the next ``<!-- end -->``."""
    before, found, rest = page.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    after = rest.partition("<!-- end -->")[2]
    page.write_text("\n".join([f"{before}{found}", *lines, "", f"<!-- end -->{after}"]), encoding="utf-8")


def read(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table as mappings."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _about_architectures() -> list[str]:
    rows = read(ARCHITECTURES)
    lines = [f"{len(rows)} architectures:", "", "| check | results |", "| --- | --- |"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for column in COLUMNS:
        counts = Counter(row[column].partition(":")[0] for row in rows if row[column] != "-")
        lines.append(f"| `{column}` | {'; '.join(f'{cell}: {count}' for cell, count in counts.most_common())} |")
        for row in rows:
            if ": " in row[column]:
                reasons.setdefault((column, row[column].partition(": ")[2]), []).append(row["architecture"])
    lines += ["", "| check | refused for | because |", "| --- | --- | --- |"]
    return [*lines, *(f"| `{column}` | {', '.join(names)} | {why} |" for (column, why), names in reasons.items())]


def _about_types() -> list[str]:
    counts = Counter(row["outcome"] for row in read(TYPES))
    lines = [f"{counts.total()} model types:", "", "| outcome | types | meaning |", "| --- | --- | --- |"]
    return [*lines, *(f"| {name} | {counts[name]} | {meaning} |" for name, meaning in MEANINGS.items() if name in counts)]


if __name__ == "__main__":
    sys.exit(main())
