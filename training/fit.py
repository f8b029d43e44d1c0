"""``python -m training.fit``: learn which heads to keep, compare, export. The work is in :mod:`training.comparison.run`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from training.commands.table import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_command("fit", arguments)


if __name__ == "__main__":
    sys.exit(main())
