"""All model types one after another, each in a process of its own: one that hangs, or takes all memory, ends alone.

What was seen is written to a file at once, line by line, so that a sweep can be stopped, resumed and shared between processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

import gates
from gates.errors import GateError, first_line
from training.coverage.every_type import TypeRow, check_type
from training.runs import progress
from training.runs.own_code import folders_fingerprint
from training.runs.tracking import versions

SECONDS = 180.0
"""Time that one type may take."""
MEMORY = 5 * 2**30
"""Bytes that one type may allocate."""
CODE = (Path(gates.__file__).parent, Path(__file__).parent)
"""Folders whose modules decide what is seen of a type."""
AGAIN = ("FAILED", "stopped")
"""Outcomes that a resumed sweep does not take over."""


def sweep(types: Sequence[str], results: str | os.PathLike[str] | None = None, *, seconds: float = SECONDS) -> list[TypeRow]:
    """Check model types.

    Args:
        types: names of model types.
        results: file of results, one line of JSON for each type; types that have one there of the same versions and of this
            very code are not run again, unless they failed.
        seconds: time that one type may take.

    Returns:
        The rows of these types, in their order.
    """
    known = {row.model_type: row for row in read_results(results)} if results is not None else {}
    if results is not None and (others := _of_others(results)):
        print(f"{others} results in {str(results)!r} are of other versions or other code, and are not used", file=sys.stderr)
    missing = [name for name in types if name not in known or known[name].outcome in AGAIN]
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["training.coverage.every_type"])
    for name in progress.track(missing, "model types", name_of=str):
        known[name] = _in_process(server, name, seconds)
        if results is not None:
            line = json.dumps({"versions": _versions(), **asdict(known[name])})
            with Path(results).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return [known[name] for name in types]


def read_results(path: str | os.PathLike[str]) -> list[TypeRow]:
    """The rows of a file of results that were made with the installed versions; the last one of each type counts.

    Raises:
        GateError: for a file that is none; a last line that was not written to its end is left out.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise GateError(f"{str(path)!r} is no file of results: {first_line(error)}; give another one") from error
    rows: dict[str, TypeRow] = {}
    for number, line in enumerate(lines, start=1):
        try:
            found = json.loads(line) if line else None
            if found is not None and found.pop("versions") == _versions():
                rows[found["model_type"]] = TypeRow(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                break
            raise GateError(
                f"line {number} of {str(path)!r} is no result of a model type ({first_line(error)}); remove it or give another "
                "file"
            ) from error
    return list(rows.values())


def _of_others(path: str | os.PathLike[str]) -> int:
    """How many lines of a file of results, which has been read, are of other versions."""
    if not Path(path).is_file():
        return 0
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return sum(f'"versions": {json.dumps(_versions())}' not in line for line in lines if line.startswith('{"versions"'))


def shard(names: Sequence[str], part: str | None) -> list[str]:
    """Every n-th name from the k-th on, for ``k/n``; all for None.

    Raises:
        GateError: for a part that is none.

    >>> shard(["a", "b", "c", "d", "e"], "2/3")
    ['b', 'e']
    """
    if part is None:
        return list(names)
    first, _, count = part.partition("/")
    if not (first.isascii() and first.isdigit() and count.isascii() and count.isdigit() and 1 <= int(first) <= int(count)):
        raise GateError(f"the shard is {part!r}; expected k/n with 1 <= k <= n, such as 1/4")
    return list(names)[int(first) - 1 :: int(count)]


def _in_process(server: Any, name: str, seconds: float) -> TypeRow:
    """The row of one type, from a process that is ended when its time is over."""
    ours, theirs = server.Pipe(duplex=False)
    process = server.Process(target=_check_in_child, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(seconds):
            return TypeRow(**ours.recv())
        reason = f"it took more than {seconds:.0f} seconds"
    except EOFError:  # ended without a word, as for want of memory
        process.join()
        reason = f"its process ended with {process.exitcode}, as where memory is short"
    finally:
        process.kill()
        process.join()
        ours.close()
    return TypeRow(name, "stopped", reason)


def _check_in_child(name: str, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, sys.stdout.fileno())
    os.dup2(sink, sys.stderr.fileno())
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        row = check_type(name)
    except MemoryError:
        row = TypeRow(name, "stopped", f"it needs more than {MEMORY // 2**30} GiB")
    except Exception as error:  # what no check foresees belongs in the table too
        row = TypeRow(name, "FAILED", f"{type(error).__name__}: {first_line(error)}")
    pipe.send(asdict(row))
    pipe.close()


@cache
def _versions() -> dict[str, str]:
    """What a result depends on: the libraries, and this project's own code that gates, removes and checks."""
    used = versions()
    return {name: used[name] for name in ("transformers", "torch")} | {"code": folders_fingerprint(*CODE)}


def counts(rows: Iterable[TypeRow]) -> dict[str, int]:
    """How many types have which outcome, those that are gated by whether heads were removed."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.group] = found.get(row.group, 0) + 1
    return found
