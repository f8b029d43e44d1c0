"""``python -m training COMMAND``, also installed as ``head-gates COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from training.cli.line import did_you_mean
from training.commands.table import COMMANDS, run_command, usage, version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 for a command that does not exist."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("--help", "-h"):
        print(usage())
        return 0 if given else 2
    if given[0] == "--version":
        print(f"head-gates {version()}")
        return 0
    if given[0] not in COMMANDS:
        near = did_you_mean(given[0], COMMANDS)
        known = "" if "did you mean" in near else f"; expected one of {', '.join(COMMANDS)}"
        print(f"error: there is no command {given[0]!r}{known or near}", file=sys.stderr)
        return 2
    return run_command(given[0], given[1:])


if __name__ == "__main__":
    sys.exit(main())
