"""How much of what a model predicts comes through each head, beside simpler scores, and how alike their rankings are."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from training.analysis.model import DenseModel, Finding, gate_columns
from training.analysis.plots import relevance_scatter
from training.scoring.scorers import Scores

RANKINGS = {"relevance": "relevance", "gradient_x_input": "gradient x input", "his": "HIS"}
"""Scores whose rankings are compared, by their columns."""


def relevance_of_heads(dense: DenseModel) -> Finding:
    """Relevance by AttnLRP's rules, gradient times input and HIS of every gate, on training data.

    Raises:
        GateError: for a family that no relevance is claimed for.
    """
    scores = Scores(dense.subject())
    raws = ("relevance", "relevance-signed", "gradient-x-input", "gradient-x-input-signed")
    found = {raw.replace("-", "_"): scores.raw(raw).numpy() for raw in raws}
    table = gate_columns(dense.gates).assign(**found, his=scores.by_layer("his").numpy())
    pairs = list(combinations(RANKINGS, 2))
    correlations = {f"{one} and {other}": _spearman(table[one], table[other]) for one, other in pairs}
    named = [f"{RANKINGS[one]} and {RANKINGS[other]} {_told(correlations[f'{one} and {other}'])}" for one, other in pairs]
    best = table.iloc[int(table["relevance"].to_numpy().argmax())]
    unit = dense.gates.unit
    sentences = [
        f"The {unit} with the largest share of its layer's relevance to the prediction is {best['site']}.{best['head']} "
        f"({100 * best['relevance']:.0f} %); equal shares in its layer would be "
        f"{100 / len(table[table['site'] == best['site']]):.0f} %.",
        f"Rank correlations (Spearman) over all {unit}s: {', '.join(named)}.",
    ]
    figure = relevance_scatter(table, by={name: title for name, title in RANKINGS.items() if name != "relevance"})
    return Finding({"relevance": table}, {"relevance": figure}, sentences, {"spearman": correlations})


def _spearman(one: pd.Series, other: pd.Series) -> float | None:
    """None where one side is constant."""
    return None if np.ptp(one) == 0 or np.ptp(other) == 0 else float(stats.spearmanr(one, other).statistic)


def _told(correlation: float | None) -> str:
    return "not measurably" if correlation is None else f"{correlation:.2f}"
