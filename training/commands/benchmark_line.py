"""What can be wrong with the line of ``python -m training benchmark``, told before PyTorch is loaded."""

from __future__ import annotations

from pathlib import Path

from gates.errors import GateError
from training.benchmark.size import Size
from training.cli.line import CommandLine
from training.commands.benchmark_parser import PARTS
from training.commands.unused import check_no_others
from training.config.checks import check_positive
from training.runs.lock import refuse_file

OF_MEASURING = ("--run_dir", "--model", "--shape", "--device", "--threads", "--sizes", "--processor_time", "--quick")


def check_line(line: CommandLine) -> None:
    """Raises :class:`GateError` for options that do not go together, or values that are none."""
    options = line.options
    part_names(options.parts)
    if options["update"] is not None:
        check_no_others(line.given, "--update", ("--parts", *OF_MEASURING))
        if options.runs:
            raise GateError(f"{options.runs[0]!r} is given, but --update does not use it; the document names its directories")
    elif options.runs:
        check_no_others(line.given, "a directory to be shown", OF_MEASURING)
    elif options.run_dir is None:
        raise GateError("--run_dir is missing; give a directory to write, or directories of earlier benchmarks to show")
    else:
        if part_names(options.parts) == ["goals"]:
            raise GateError(
                "--parts is 'goals', which are of parts that are measured; name such parts too, or directories of earlier "
                "benchmarks in place of --run_dir"
            )
        refuse_file(Path(options.run_dir))
        parsed_sizes(options.sizes)
        if options.threads is not None:
            check_positive(**{"--threads": options.threads})
        if options.model is not None and not (Path(options.model) / "config.json").is_file():
            raise GateError(f"--model {options.model!r} is no folder with a config.json; give the folder of a model")
        if options.model is not None:
            check_no_others(line.given, "--model", ("--shape",))


def part_names(text: str | None) -> list[str]:
    """Each once. Raises :class:`GateError` for a name that is none."""
    names = text.split(",") if text is not None else []
    for name in names:
        if name not in PARTS:
            raise GateError(f"--parts has {name!r}; expected some of {', '.join(PARTS)}")
    return list(dict.fromkeys(names))


def parsed_sizes(text: str | None) -> tuple[Size, ...]:
    """Each once. Raises :class:`GateError` for a text that is no list of sizes."""
    return tuple(dict.fromkeys(Size.parse(size) for size in text.split(","))) if text is not None else ()
