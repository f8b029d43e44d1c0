"""``python -m training report RUN... --output report.html``: results as one page that needs nothing else, and as pictures."""

from __future__ import annotations

import sys
from pathlib import Path

from gates.errors import GateError
from training.cli.line import CommandLine
from training.report.page import write_report
from training.report.reading import read_contents
from training.runs import progress


def report_runs(line: CommandLine) -> None:
    """Read the directories, write the page and its pictures, and say what there was no picture of."""
    output = Path(line.options.output)
    if output.is_dir():
        raise GateError(f"--output {str(output)!r} is a directory; give the name of a file, such as report.html")
    found = [read_contents(Path(run)) for run in line.options.runs]
    with progress.stage("report"):
        write_report(found, output)
    for contents in found:
        for sentence in contents.missing:
            print(f"{contents.path}: {sentence}", file=sys.stderr)
    print(f"report: {output}")
    print(f"pictures: {output.parent / 'figures'}")
