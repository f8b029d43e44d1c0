"""The pictures of roles: a map of all heads, and which of them methods keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gates.sites import KINDS
from training.plotting import COLOURS, INK, styled

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
PANELS = 4


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
def survivors(table: pd.DataFrame, counts: pd.DataFrame) -> Figure:
    """Heads of every role that methods keep, a panel for each of the first methods and a bar for each budget, as in Voita et
    al.'s figure 8; the leftmost bar is the dense model. A head with several roles counts in each.

    Args:
        table: of roles, a row for each head.
        counts: kept heads by method, budget and role.
    """
    methods = list(dict.fromkeys(counts["method"]))
    shown = [name for name in ("learned", "his", "random") if name in methods]
    shown += [name for name in methods if name not in shown][: PANELS - len(shown)]
    names = [name for name in [*COLOUR_OF, "none"] if (counts["role"] == name).any()]
    figure = Figure(figsize=(1.6 + 2.6 * len(shown), 3.8), layout="constrained")
    for axes, method in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        own = counts[counts["method"] == method]
        budgets = [len(table), *sorted(own["budget"].unique(), reverse=True)]
        bottom = np.zeros(len(budgets))
        for name in names:
            of_role = own[own["role"] == name].set_index("budget")
            heights = [float(of_role["heads"].iloc[0]), *(float(of_role.loc[budget, "kept"]) for budget in budgets[1:])]
            colour = COLOUR_OF.get(name, BLANK)
            axes.bar(range(len(budgets)), heights, bottom=bottom, color=colour, edgecolor=INK, linewidth=0.2, label=name)
            bottom += heights
        axes.set(title=method, xlabel="heads kept")
        axes.set_xticks(range(len(budgets)), [f"{budget}" for budget in budgets])
    figure.axes[0].set_ylabel("heads with the role (mean over seeds)")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure
