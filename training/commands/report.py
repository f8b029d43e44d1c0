"""``head-gates report RUN... --output report.html``: results as one page that needs nothing else, and as pictures."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gates.errors import GateError, first_line
from training.cli.command_line import CommandLine
from training.report.page import write_report
from training.report.reading import read_contents
from training.runs import progress
from training.runs.directory import check_output, writing_to


def report_runs(line: CommandLine) -> None:
    """Read the directories, write the page and its pictures, and say what there was no picture of."""
    output = Path(line.options.output)
    check_output(output, "<title>Attention heads", "report")
    with damaged_runs_refused(line.options.runs):
        roles = None if line.options.roles is None else Path(line.options.roles)
        found = [read_contents(Path(run), roles) for run in line.options.runs]
        with progress.stage("report"), writing_to(output):
            write_report(found, output)
    for contents in found:
        for sentence in contents.missing:
            print(f"{contents.path}: {sentence}", file=sys.stderr)
    print(f"report: {output}")
    print(f"pictures: {output.parent / 'figures'}")


@contextmanager
def damaged_runs_refused(runs: Sequence[str]) -> Iterator[None]:
    """Raise :class:`GateError` in place of the errors of drawing tables that no command has written together."""
    try:
        yield
    except GateError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise GateError(
            f"the tables in {', '.join(repr(str(run)) for run in runs)} do not belong together, since one is damaged or was "
            f"changed ({type(error).__name__}: {first_line(error)}); start the command that wrote them again"
        ) from error
