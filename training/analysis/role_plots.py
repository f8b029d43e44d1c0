"""The pictures of roles: a map of all heads, and what single heads attend to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gates.sites import KINDS
from training.plotting import COLOURS, INK, MAP, styled

BLANK = "#ffffff"
COLOUR_OF = {
    "positional": COLOURS[0],
    "syntactic": COLOURS[2],
    "rare": COLOURS[4],
    "coreference": COLOURS[1],
    "induction": COLOURS[3],
    "duplicate": COLOURS[7],
    "separator": "#b5b8bc",
    "first-token": "#d3d5d8",
    "broad": "#e8e9ea",
}
"""Specialised roles in colours, background in greys."""


@styled
def role_map(table: pd.DataFrame, names: Sequence[str]) -> Figure:
    """Layer x head in the colours of all roles of each head, side by side; white heads have none.

    Args:
        table: a row for each head, see :func:`training.analysis.roles.role_table`.
        names: of the roles that were measured.
    """
    kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
    height = table.groupby("kind")["site"].nunique().max()
    figure = Figure(figsize=(1.4 + 4.2 * len(kinds), 1.8 + 0.35 * height), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        own = table[table["kind"] == kind]
        sites = list(dict.fromkeys(own["site"]))
        for _, row in own.iterrows():
            held = [name for name in names if row[f"{name}_has"]]
            for part, name in enumerate(held or [""]):
                width = 0.92 / max(1, len(held))
                corner = (row["head"] - 0.46 + part * width, sites.index(row["site"]) - 0.44)
                axes.add_patch(
                    Rectangle(corner, width, 0.88, facecolor=COLOUR_OF.get(name, BLANK), edgecolor=INK, linewidth=0.2)
                )
        axes.set(title=kind, xlabel="head", ylabel="layer", xlim=(-0.6, own["head"].max() + 0.6), ylim=(len(sites) - 0.4, -0.6))
        axes.set_yticks(range(len(sites)), [site.rpartition(".")[2] for site in sites])
        axes.set_xticks(range(int(own["head"].max()) + 1))
    patches = [Patch(facecolor=COLOUR_OF[name], edgecolor=INK, linewidth=0.2, label=name) for name in names]
    patches.append(Patch(facecolor=BLANK, edgecolor=INK, linewidth=0.2, label="none"))
    figure.legend(handles=patches, loc="outside lower center", ncols=5)
    figure.suptitle("what each head does; greys are background")
    return figure


@styled
def attention_map(weights: Any, queries: Sequence[str], keys: Sequence[str], title: str) -> Figure:
    """One head's attention in one sentence.

    Args:
        weights: ``[query, key]``.
        queries, keys: tokens.
        title: of the picture.
    """
    side = 1.6 + 0.22 * max(len(keys), len(queries))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.asarray(weights), cmap=MAP, vmin=0, vmax=1)
    axes.set_xticks(range(len(keys)), keys, rotation=90)
    axes.set_yticks(range(len(queries)), queries)
    axes.set(title=title, xlabel="attended to", ylabel="attending")
    return figure
