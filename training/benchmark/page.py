"""What was measured as tables: for a terminal, and as Markdown, records of several devices one below the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from training.benchmark.goals import Judged, judge
from training.benchmark.parts import PARTS, Part
from training.benchmark.record import Record, Rows

NOTHING = ""
SHARES = {"heads_kept": 1, "of_ideal": 0, "parameters_left": 0, "memory_left": 0, "difference": 2}
"""Columns in percent, with their decimals."""
GOALS = "goals"
GOAL_HEADINGS = ("goal", "bound", "worst", "kept in", "quartiles on both sides", "verdict")


def shown(cell: Any, column: str = "") -> str:
    """A cell as it is read, a median with its quartiles; a share in percent.

    >>> shown({"median": 1.0042, "low": 0.998, "high": 1.0119}), shown(1234567), shown(0.125, "heads_kept"), shown(None)
    ('1.004 (0.998 to 1.012)', '1,234,567', '12.5 %', '')
    """
    if cell is None:
        return NOTHING
    if isinstance(cell, Mapping):
        return f"{shown(cell['median'])} ({shown(cell['low'])} to {shown(cell['high'])})"
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return str(cell)
    if column in SHARES:
        return f"{100 * cell:.{SHARES[column]}f} %"
    if isinstance(cell, int) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.3f}"


def cells(part: Part, rows: Rows) -> list[list[str]]:
    """The rows of a part as texts, in the order of its columns."""
    return [[shown(row.get(column), column) for column in part.columns] for row in rows]


def judged(record: Record, names: Sequence[str]) -> list[Judged]:
    """The goals of these parts on the record's device; none of a quick look."""
    if record.setting["quick"]:
        return []
    return [found for name in names for found in judge(PARTS[name].goals, record.parts.get(name, []), record.device)]


def goal_cells(found: Judged) -> list[str]:
    """A goal as texts, under :data:`GOAL_HEADINGS`."""
    goal = found.goal
    measured = [NOTHING] * 3
    if found.worst is not None:
        measured = [f"{found.worst:.3g}", f"{found.reached} of {found.rows}", f"{found.undecided} of {found.rows}"]
    return [goal.text, f"{goal.sense} {goal.bound:g}", *measured, found.verdict]


def show(console: Console, record: Record, names: Sequence[str]) -> None:
    """Print the tables of these parts, and the goals."""
    for name in names:
        if name in record.parts:
            part = PARTS[name]
            _print(console, part.title, list(part.columns.values()), cells(part, record.parts[name]))
    if goals := judged(record, names):
        _print(console, "Goals", list(GOAL_HEADINGS), [goal_cells(goal) for goal in goals])
    console.print(f"Measured on {machine(record)}.", highlight=False)


def _print(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*headings, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown(records: Sequence[Record], name: str) -> str:
    """The table of a part, or that of the goals, for every record that has it, each with its machine."""
    blocks = []
    for record in records:
        if name == GOALS:
            rows, headings = [goal_cells(goal) for goal in judged(record, list(PARTS))], list(GOAL_HEADINGS)
        else:
            rows, headings = cells(PARTS[name], record.parts.get(name, [])), list(PARTS[name].columns.values())
        if rows:
            lines = [" | ".join(headings), " | ".join("---" for _ in headings), *(" | ".join(row) for row in rows)]
            blocks.append("\n".join([f"{machine(record)}:", "", *(f"| {line} |" for line in lines)]))
    return "\n\n".join(blocks) if blocks else "Not measured yet."


def machine(record: Record) -> str:
    """On what and with what it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    model = record.setting["model"] or f"a random model, {record.setting['shape']}"
    quick = "; a quick look, no measurement" if record.setting["quick"] else ""
    kind = "; time that the processor worked" if record.setting["processor_time"] else ""
    code = f"; code {record.code}" if record.code else ""
    return f"{record.machine['hardware']} ({record.machine['cores']} cores); {model}; {versions}{code}{kind}{quick}"
