"""Clark et al.'s (2019) table 1, which the best heads of a treebank are put beside."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from training.stats.numbers import listed


class Published(NamedTuple):
    """A relation of BERT-base on the Penn Treebank, in percent.

    Args:
        relation: by its name in Stanford Dependencies.
        names: by which a treebank may call it, of Stanford Dependencies and of Universal Dependencies.
        head: share of the best head.
        offset: share of the best fixed offset.
    """

    relation: str
    names: tuple[str, ...]
    head: float
    offset: float


CLARK = (
    Published("det", ("det",), 94.3, 51.7),
    Published("dobj", ("dobj", "obj"), 86.8, 40.0),
    Published("nsubj", ("nsubj",), 58.5, 45.5),
    Published("poss", ("poss", "nmod:poss"), 80.5, 47.7),
    Published("amod", ("amod",), 75.6, 68.3),
    Published("aux", ("aux",), 81.1, 71.5),
    Published("advmod", ("advmod",), 48.8, 40.2),
    Published("conj", ("conj",), 53.3, 26.8),
)
NAMED = 4
"""That are told in words."""


def beside_clark(relations: pd.DataFrame) -> pd.DataFrame:
    """The best head of every relation in :data:`CLARK`, of both directions the better one, beside the published figures.

    Args:
        relations: a row for each relation and direction, see :func:`training.analysis.roles.best_heads`.
    """
    rows = []
    for published in CLARK:
        own = relations[relations["relation"].isin(published.names)]
        if not len(own):
            continue
        best = own.iloc[int(own["share"].to_numpy().argmax())]
        measured = {name: best[name] for name in ("relation", "direction", "count", "head", "share", "low", "high", "offset")}
        there = {"share_there": published.head / 100, "baseline_there": published.offset / 100}
        rows.append({"clark": published.relation, **measured, "baseline": best["baseline"], **there})
    return pd.DataFrame(rows)


def clark_told(table: pd.DataFrame) -> list[str]:
    """The first relations in words; nothing where the treebank has none of them often enough."""
    if not len(table):
        return []
    parts = [
        f"{row['relation']} {100 * row['share']:.1f} ({100 * row['baseline']:.1f}) here and {100 * row['share_there']:.1f} "
        f"({100 * row['baseline_there']:.1f}) there"
        for row in table.head(NAMED).to_dict("records")
    ]
    return [
        "Beside Clark et al. 2019 (BERT-base on the Penn Treebank), best head and in brackets best fixed offset, %: "
        f"{listed(parts)}."
    ]
