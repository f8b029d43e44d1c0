"""``python -m training benchmark``: what gates, scores and pruned models cost, measured here or read from earlier runs.

A document says between two comments which records a table is of; ``--update docs/benchmarks.md`` makes all its tables anew::

    <!-- python -m training benchmark notebooks/results/benchmarks/cpu --parts step -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gates.errors import GateError
from training.benchmark.page import GOALS, markdown, show
from training.benchmark.parts import PARTS
from training.benchmark.record import FILE, Record
from training.benchmark.setting import DEFAULT_SIZES, Setting, threads_of
from training.benchmark.size import Size
from training.cli.ending import advised, stdout
from training.cli.line import CommandLine
from training.commands.benchmark_line import OF_MEASURING, parsed_sizes, part_names
from training.commands.benchmark_parser import benchmark_parser
from training.commands.documents import update_tables
from training.commands.unused import check_no_others
from training.runs import progress
from training.runs.lock import only_writer
from training.setup import quiet_libraries

AGAIN = "the same command goes on with the part that was under way"


def benchmark(line: CommandLine) -> None:
    """Measure, or show what was measured."""
    options, names = line.options, part_names(line.options.parts)
    if (document := options["update"]) is not None:  # options.update is a method of theirs
        update(Path(document))
    elif options.runs:
        print(tables([Path(run) for run in options.runs], options.parts))
    else:
        measure(line, [name for name in names or PARTS if name != GOALS])


def measure(line: CommandLine, names: Sequence[str]) -> None:
    """Measure what the directory does not have, write after every part, and show all."""
    quiet_libraries()
    setting = setting_of(line.options)
    folder = Path(line.options.run_dir)
    with only_writer(folder), threads_of(setting):
        record = Record.of(shown_command(line.given), setting)
        if os.path.lexists(folder / FILE):
            earlier = Record.read(folder)
            earlier.check_goes_on(record, folder)
            record = earlier
        elif any(path.name != ".lock" for path in folder.iterdir()):
            raise GateError(f"--run_dir {str(folder)!r} is not empty and holds no benchmark; give another directory")
        missing = [name for name in names if name not in record.parts]
        with advised(lambda: AGAIN), progress.stage("benchmark", total=len(missing)) as shown:
            for name in missing:
                shown.work_on(name)
                rows = PARTS[name].measure(setting)
                record = replace(record, parts={**record.parts, name: rows})
                record.write(folder)
                shown.advance()
    show(stdout(), record, names)


def setting_of(options: Any) -> Setting:
    """Raises :class:`GateError` for what cannot be measured here, before anything is."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise GateError("--device is cuda, but PyTorch sees no GPU here; give cpu, or leave it out")
    if device == "cuda" and options.processor_time:
        raise GateError("--processor_time is given, but a GPU has times of its own; leave it out, or give --device cpu")
    threads = torch.get_num_threads() if options.threads is None else options.threads
    shape = options.shape or ("tiny" if options.quick else "base" if device == "cuda" else "small")
    default = tuple(Size.parse(size) for size in DEFAULT_SIZES["quick" if options.quick else device])
    sizes = parsed_sizes(options.sizes) or default
    setting = Setting(shape, options.model, device, threads, sizes, options.processor_time, options.quick)
    setting.check_lengths()
    return setting


def shown_command(given: Sequence[str]) -> str:
    """The command as it can be typed elsewhere: of folders, the last name alone."""
    words, named = [], ""
    for argument in given:
        name, equals, value = argument.partition("=")
        if name in ("--run_dir", "--model") and equals:
            words.append(f"{name}={Path(value).name}")
        else:
            words.append(Path(argument).name if named in ("--run_dir", "--model") else argument)
        named = argument
    return shlex.join(["python", "-m", "training", "benchmark", *words])


def update(document: Path) -> None:
    """Make every table of this command in a document anew; see :func:`update_tables`."""

    def made(given: Sequence[str], options: Any) -> str:
        check_no_others(given, "a table in a document", ("--update", *OF_MEASURING))
        return tables([document.parent / run for run in options.runs], options.parts)

    update_tables(document, "benchmark", benchmark_parser(), made)


def tables(runs: Sequence[Path], parts: str | None) -> str:
    """What earlier benchmarks found, as Markdown: the named parts, or all that were measured, with the goals."""
    records = [Record.read(run) for run in runs]
    measured = [name for name in PARTS if any(record.parts.get(name) for record in records)]
    return "\n\n".join(markdown(records, name) for name in part_names(parts) or [*measured, GOALS])
