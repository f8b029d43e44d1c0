"""The picture of what survives."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from training.analysis.role_plots import BLANK, COLOUR_OF
from training.plotting import INK, styled

PANELS = 4


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
