"""Format numbers for people: metrics in percent where that is usual, the same everywhere in a report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeVar

import pandas as pd

Number = TypeVar("Number", float, pd.Series)
NONE = "\N{EN DASH}"
"""The sign for a missing number."""
IN_PERCENT = dict.fromkeys(
    ("accuracy", "f1", "binary_f1", "matthews", "pearson", "spearman", "token_accuracy", "entity_f1"), " %"
)
"""Metrics that are fractions in files and shown times 100 (correlations too, as GLUE does)."""

BOUNDS = {
    "accuracy": (0.0, 1.0), "f1": (0.0, 1.0), "binary_f1": (0.0, 1.0), "matthews": (-1.0, 1.0),
    "token_accuracy": (0.0, 1.0), "entity_f1": (0.0, 1.0), "pearson": (-1.0, 1.0),
    "spearman": (-1.0, 1.0), "bleu": (0.0, 100.0), "chrf": (0.0, 100.0),
    "perplexity": (1.0, math.inf), "word_perplexity": (1.0, math.inf), "byte_perplexity": (1.0, math.inf),
}  # fmt: skip
"""The least and the largest possible value of metrics."""
CACHE = "kv_bytes_per_token"
"""Column of the bytes of keys and values that generation keeps of each token."""
CLOSED = "closed_by_gates"
"""The column of the share of closed heads that gates had closed at the end of the prune phase, before rank closed the rest."""


def shown(metric: str, value: Number) -> Number:
    """Return a metric's value, or a column of values, on the scale that is shown."""
    return 100 * value if unit(metric) else value


def unit(metric: str) -> str:
    """Return the unit of a shown value, after a space; also of a metric on a further test split.

    >>> unit("accuracy"), unit("mismatched_accuracy"), unit("loss")
    (' %', ' %', '')
    """
    return next((sign for known, sign in IN_PERCENT.items() if metric == known or metric.endswith(f"_{known}")), "")


def scale(metric: str) -> str:
    """Return `` in percent`` for a metric that is shown times 100, and nothing for others."""
    return " in percent" if unit(metric) else ""


def number(metric: str, value: float) -> str:
    """Return a metric's value without its unit, such as ``91.76``; a dash if it is missing."""
    return NONE if math.isnan(value) else f"{shown(metric, value):.2f}"


def quantity(metric: str, value: float) -> str:
    """Return a metric's value with its unit, such as ``91.76 %``."""
    return number(metric, value) + unit(metric)


def signed(value: float, decimals: int = 1) -> str:
    """Return a difference with its sign, and more decimals where its first digit needs them: ``-3.2``, ``+0.04``."""
    value = round(value, 9)  # so that equal differences read alike
    if not value:
        return f"{0:.{decimals}f}"
    while not float(f"{value:.{decimals}f}"):
        decimals += 1
    return f"{value:+.{decimals}f}"


def slug(text: str) -> str:
    """Return a name of lower-case letters, digits and underscores, for files and ids."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unnamed"


def listed(names: list[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def counted(count: int, noun: str) -> str:
    """Return ``1 seed``, ``3 seeds``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def kinds_kept(kinds: Mapping[str, float]) -> str:
    """Return ``encoder 10, cross 20``."""
    return ", ".join(f"{kind} {kept}" for kind, kept in kinds.items())


def in_brackets(kinds: Mapping[str, int]) -> str:
    """Return `` (encoder 10)``; nothing for budgets of all kinds together."""
    return f" ({kinds_kept(kinds)})" if kinds else ""


def budget_label(budget: int, kinds: Mapping[str, int], unit: str = "head", within: str = "") -> str:
    """Return ``18 heads``, ``106 heads (encoder 10)`` for a budget per kind, ``18 heads at most, within 12 ms`` for a time."""
    return counted(budget, unit) + in_brackets(kinds) + (f" at most, within {within}" if within else "")


def duration(seconds: float) -> str:
    """Return a duration with a readable unit: ``12 s``, ``3.5 min``, ``2.1 h``."""
    if math.isnan(seconds):
        return NONE
    if 0 < seconds < 0.05:
        return "< 0.1 s"
    for size, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
