"""The attention of any head in a few sentences, which the experiment roles leaves beside ``roles.csv`` and pages show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gates.sites import KINDS
from training.report.role_table import FIND_AGAIN
from training.runs.stored import damaged, read_json

ATTENTION = "attention.json"
HEAD, SENTENCE = ("name", "kind", "roles", "site", "head"), ("name", "tokens", "weights")


def as_text(attention: dict[str, Any]) -> str:
    """Attention as compact JSON."""
    return json.dumps(attention, separators=(",", ":"))


def read_attention(folder: Path) -> str | None:
    """The attention that lies beside a table of roles, as a page holds it; None where there is none.

    Raises:
        GateError: if it is damaged.
    """
    path = folder / ATTENTION
    try:
        found = read_json(path, dict, mend=FIND_AGAIN)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        for head in found["heads"]:
            _check(head, found["sentences"])
        _ = found["heads"][found["first"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise damaged(path, "the attention of heads", f"{type(error).__name__}: {error}", FIND_AGAIN) from error
    return as_text(found)


def _check(head: dict[str, Any], sentences: list[dict[str, Any]]) -> None:
    """Raises some error where the attention of a head is not that of a sentence's tokens."""
    _, kind, _, site, number = (head[name] for name in HEAD)
    if kind not in KINDS:
        raise ValueError(f"the kind {kind!r}")
    for sentence in sentences:
        _, tokens, weights = (sentence[name] for name in SENTENCE)
        queries, keys = tokens[kind]
        rows = weights[site][number]
        if len(rows) != len(queries) or any(len(row) != len(keys) for row in rows):
            raise ValueError(f"{head['name']} has weights of other tokens")
