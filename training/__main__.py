"""``python -m training COMMAND``, also installed as ``head-gates COMMAND``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from training.runs.own_code import import_from_here

COMMANDS = {
    "fit": ("training.fit", "learn which heads to keep, compare, export"),
    "compare": ("training.commands.compare", "methods x budgets x seeds, at equal training cost"),
    "report": ("training.commands.report", "runs and comparisons as one page, with pictures"),
    "summary": ("training.commands.summary", "tables over runs"),
    "analyze": ("training.analysis.analyze", "Michel et al.'s further experiments on a trained model"),
    "sweep": ("training.sweeps.local", "a sweep in W&B's format, on this machine"),
    "export": ("training.commands.export", "a finished run's model in another form or at another budget"),
    "convert": ("training.commands.convert", "checkpoints whose heads Transformers 4 pruned"),
    "translate": ("training.commands.translate", "a file translated by one or more systems, with BLEU"),
    "benchmark": ("training.commands.benchmark", "tokens per second of translators"),
    "coverage": ("training.coverage.coverage", "what works for which architecture"),
}
"""Module and purpose of every command; a module is imported when its command runs, since most load much."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 for a command that does not exist."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("--help", "-h"):
        print(usage())
        return 0 if given else 2
    if given[0] not in COMMANDS:
        print(f"error: unknown command {given[0]!r}; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    import_from_here()  # a user's own data and scores
    command = importlib.import_module(COMMANDS[given[0]][0])
    return int(command.main(given[1:]))


def usage() -> str:
    """Every command with its purpose."""
    lines = [f"  {name:<10} {purpose}" for name, (_, purpose) in COMMANDS.items()]
    first, last = "usage: python -m training COMMAND [OPTIONS]", "COMMAND --help shows a command's options."
    return "\n".join([first, "", *lines, "", last])


if __name__ == "__main__":
    sys.exit(main())
