"""``python -m training coverage``: the architectures of the table, checked in every way, and then every model type."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict

import transformers
from rich.table import Table

from gates.errors import GateError
from gates.files import replacing
from training.cli.ending import stdout
from training.cli.line import CommandLine
from training.coverage import architectures as zoo
from training.coverage.coverage import HEADING, Row, coverage, markdown
from training.coverage.every_type import TypeRow
from training.coverage.page import page
from training.coverage.sweep import counts, shard, sweep
from training.coverage.types import model_types
from training.runs.outputs import check_new_output


def cover_architectures(line: CommandLine) -> None:
    """The whole command.

    Raises:
        GateError: if some check failed, once everything is written.
    """
    options = line.options
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for path, mark in ((options.json, '"architecture": '), (options.output, HEADING), (options.results, '"model_type"')):
        if path is not None:
            check_new_output(path, mark, "table of this command")
    architectures, types = _chosen(options.only, options.shard, with_types=options.types)
    rows = _of_architectures(architectures, onnx=options.onnx) if architectures or not types else []
    seen = _of_types(types, options.results) if types else []
    for path, text in (
        (options.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n"),
        (options.output, markdown(rows) + (f"\n{page(seen)}" if seen else "")),
    ):
        if path is not None:
            with replacing(path) as partial:
                partial.write_text(text, encoding="utf-8")
    if failed := [row for row in rows if row.failed]:
        raise GateError(f"{len(failed)} of {len(rows)} architectures failed a check; the table says which")
    if bad := [row for row in seen if row.outcome == "FAILED"]:
        names = ", ".join(row.model_type for row in bad[:5])
        raise GateError(f"{len(bad)} of {len(seen)} model types failed a check ({names}); the table says which")


def _chosen(only: Sequence[str], part: str | None, *, with_types: bool) -> tuple[list[zoo.Architecture], list[str]]:
    """The architectures and the model types whose names have one of these parts, and of these a shard."""

    def is_meant(name: str) -> bool:
        return not only or any(given.lower() in name.lower() for given in only)

    rows = [row for row in zoo.ARCHITECTURES if is_meant(row.name)]
    types = [name for name in (model_types() if with_types else ()) if is_meant(name)]
    for given in only:
        if not any(given.lower() in name.lower() for name in (*(row.name for row in rows), *types)):
            names = ", ".join(row.name for row in zoo.ARCHITECTURES)
            raise GateError(
                f"--only names {given!r}, which is part of no architecture's name; there are {names}, and the model types of "
                "Transformers"
            )
    chosen = shard([row.name for row in rows], part)
    return [row for row in rows if row.name in chosen], shard(types, part)


def _of_architectures(chosen: Sequence[zoo.Architecture], *, onnx: bool) -> list[Row]:
    start = time.perf_counter()
    rows = coverage(chosen, onnx=onnx)
    table = Table(title=f"{len(rows)} architectures, {time.perf_counter() - start:.0f} s")
    for name in Row.__dataclass_fields__:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*asdict(row).values())
    stdout().print(table)
    return rows


def _of_types(types: Sequence[str], results: str | None) -> list[TypeRow]:
    start = time.perf_counter()
    rows = sweep(types, results)
    table = Table(title=f"{len(rows)} model types, {time.perf_counter() - start:.0f} s")
    for name in ("outcome", "types"):
        table.add_column(name)
    for outcome, number in sorted(counts(rows).items(), key=lambda item: -item[1]):
        table.add_row(outcome, str(number))
    stdout().print(table)
    return rows
