"""The table of all model types for the documentation: counts, then one table for each outcome."""

from __future__ import annotations

from collections.abc import Sequence

from training.coverage.every_type import REMOVAL, REMOVED, TypeRow
from training.coverage.sweep import counts

MEANINGS = {
    REMOVED: "gates of one change no bit, a closed head is a block of zeros in its output projection, scores are the slopes of "
    "the loss; heads were removed, saved, loaded again, and the outputs are those of the gated model",
    "gated": "the same, but for removing heads, which is refused or did not work here, with the reason",
    "scored in part": "gates are as exact; the model itself stops gradients on their way, and scores leave that way out",
    "refused": "the library says in one sentence why not",
    "no inputs": "no inputs are known on which all of its attention runs, so nothing was checked",
    "no attention": "the tiny model made of its defaults has no attention",
    "not built": "no tiny model could be made of it here",
    "stopped": "it took more time or memory than it may",
    "FAILED": "a check did not pass",
}
CAVEATS = (
    f"Outputs after removing may differ by {REMOVAL:g} of the largest output, or by {REMOVAL:g} itself where that is below 1.",
    "Slopes are sampled: of the first head, the middle one, the last, and the one with the largest score.",
)
"""What the checks cannot see."""
LONGEST = 200
"""Characters of a reason; the rest is left out."""


def page(rows: Sequence[TypeRow]) -> str:
    """Markdown for all model types.

    Args:
        rows: of :func:`training.coverage.sweep.sweep`.
    """
    number = counts(rows)
    lines = [
        "## Every model type",
        "",
        "Each is built tiny from the defaults of its configuration class, by rules on the names of its fields. Two things",
        "are not checked here as they are in the table above: entropy is not compared at all, and the kind of attention only",
        "where its module can be called on its own; attention within blocks and pools may pass for `cross` there.",
        "",
        *CAVEATS,
        "",
        "| outcome | types | meaning |",
        "| --- | --- | --- |",
        *(f"| {outcome} | {number[outcome]} | {meaning} |" for outcome, meaning in MEANINGS.items() if outcome in number),
    ]
    for outcome in MEANINGS:
        of = [row for row in rows if row.group == outcome]
        if not of:
            continue
        lines += ["", f"### {outcome[0].upper()}{outcome[1:]}", ""]
        if outcome == REMOVED:
            lines += _by_kinds(of)
        elif outcome == "no attention":
            lines.append(", ".join(row.model_type for row in of))
        else:
            lines += ["| type | class | reason |", "| --- | --- | --- |", *(_row(row) for row in of)]
    return "\n".join(lines) + "\n"


def _by_kinds(rows: Sequence[TypeRow]) -> list[str]:
    """Names of types, by the kinds of attention that they have."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(", ".join(row.heads or {}), []).append(row.model_type)
    return [
        "| attention | types |",
        "| --- | --- |",
        *(f"| {kinds} ({len(names)}) | {', '.join(names)} |" for kinds, names in sorted(groups.items())),
    ]


def _row(row: TypeRow) -> str:
    reason = (row.reason or row.removed.removeprefix("no: ")).replace("|", "/").replace("<", "&lt;")
    reason = reason if len(reason) <= LONGEST else reason[:LONGEST].rpartition(" ")[0] + " ..."
    return f"| {row.model_type} | {row.model} | {reason} |"
