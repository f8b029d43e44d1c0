"""``head-gates COMMAND``, also ``python -m training COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from gates.errors import GateError
from training.cli.command_line import did_you_mean
from training.cli.exit import finish
from training.commands.table import COMMANDS, NOTHING, run_command, usage, version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, 2 for a command that does not exist."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("--help", "-h"):
        return finish(usage, print, when_stopped=NOTHING) or (0 if given else 2)
    if given[0] == "--version":
        return finish(lambda: f"head-gates {version()}", print, when_stopped=NOTHING)
    if given[0] not in COMMANDS:
        return finish(lambda: refuse(given[0]), print, when_stopped=NOTHING)
    return run_command(given[0], given[1:])


def refuse(name: str) -> NoReturn:
    """Raise :class:`GateError` for a command that does not exist."""
    near = did_you_mean(name, COMMANDS)
    known = "" if "did you mean" in near else f"; expected one of {', '.join(COMMANDS)}"
    raise GateError(f"there is no command {name!r}{known or near}")


if __name__ == "__main__":
    sys.exit(main())
