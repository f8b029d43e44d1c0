"""Tables of the pages that these commands write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar in a cell, which would end it, becomes a slash."""
    cells = (" | ".join(cell.replace("|", "/") for cell in row) for row in rows)
    return [f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *(f"| {row} |" for row in cells)]
