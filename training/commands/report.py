"""``python -m training report RUN... --out report.html``: results as one page that needs nothing else, and as pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gates.errors import GateError
from training.cli import finish
from training.report.page import write_report
from training.report.reading import read_contents
from training.runs import progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for input that its user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m training report",
        description="One self-contained HTML page about runs and comparisons, and its pictures as PNG, SVG and GIF beside it.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of training compare or training.fit")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page; pictures go to figures/ beside it")
    return finish(lambda: parser.parse_args(arguments), report, when_stopped="nothing was written")


def report(options: argparse.Namespace) -> None:
    """Read the directories, write the page and its pictures, and say what there was no picture of."""
    if options.out.is_dir():
        raise GateError(f"--out {str(options.out)!r} is a directory; give the name of a file, such as report.html")
    with progress.stage("report"):
        found = [read_contents(run) for run in options.runs]
        write_report(found, options.out)
    for contents in found:
        for sentence in contents.missing:
            print(f"{contents.path}: {sentence}", file=sys.stderr)
    print(f"report: {options.out}")
    print(f"pictures: {options.out.parent / 'figures'}")
