"""At which depth roles lie: positional early, syntactic in the middle, coreference late, as lecture notes have it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np
import pandas as pd

from gates.roles.roles import RULES
from training.stats.bootstrap import Array
from training.stats.numbers import counted, listed
from training.stats.significance import Interval, interval

BACKGROUND = "background"
CLAIMED = ("positional", "syntactic", "coreference")
"""Roles of which lecture notes say that they lie early, in the middle and late."""


def depths_of(table: pd.DataFrame) -> dict[str, Array]:
    """The relative depths of the self-attention heads with each role, from 0 (first layer) to 1 (last), and of the heads
    without a specialised one; roles that no head has are left out.

    Args:
        table: of roles, a row for each head.
    """
    own = table[table["kind"] != "cross"]
    last = own.groupby("kind")["layer"].transform("max").clip(lower=1)
    depth = (own["layer"] / last).to_numpy(dtype=float)
    members = {rule.name: own[f"{rule.name}_has"].to_numpy(dtype=bool) for rule in RULES}
    members[BACKGROUND] = ~own["specialised"].to_numpy(dtype=bool)
    return {name: depth[has] for name, has in members.items() if has.any()}


def depth_table(depths: dict[str, Array]) -> pd.DataFrame:
    """The mean depth of every role with its interval, see :func:`mean_depth`."""
    rows = [(name, found.seeds, found.mean, found.low, found.high) for name, found in mean_depths(depths).items()]
    return pd.DataFrame(rows, columns=["role", "heads", "depth", "low", "high"])


def depth_told(depths: dict[str, Array], measured: Collection[str] = CLAIMED) -> list[str]:
    """Whether positional heads lie before syntactic ones, and these before coreference, as far as there are any.

    Args:
        depths: see :func:`depths_of`.
        measured: roles that heads could be found to have.
    """
    found = {name: mean for name, mean in mean_depths(depths).items() if name in CLAIMED}
    if not found:
        return []
    parts = [f"{name} {mean.mean:.2f} ({counted(mean.seeds, 'head')}{_sure(mean)})" for name, mean in found.items()]
    sentences = [f"Mean depth of heads, from 0 (first layer) to 1 (last): {listed(parts)}."]
    orders = [_order(one, other, found) for one, other in pairwise(found)]
    if orders:
        sentences.append(f"Positional early, syntactic in the middle and coreference late: {listed(orders)}.")
    if missing := [name for name in CLAIMED if name in measured and name not in found]:
        sentences.append(f"Of {listed(missing)} heads there are none, so that their depth is not tested.")
    return sentences


def mean_depths(depths: dict[str, Array]) -> dict[str, Interval]:
    """:func:`mean_depth` of every role."""
    return {name: mean_depth(values) for name, values in depths.items()}


def mean_depth(depths: Array) -> Interval:
    """The mean with Student's interval over heads, within the model's depth; NaN for a single head, and where all are of one
    layer, which says nothing of how far apart others would lie."""
    found = interval(depths)
    if not found.std > 0:
        return found._replace(low=np.nan, high=np.nan)
    return found._replace(low=max(found.low, 0.0), high=min(found.high, 1.0))


def _sure(mean: Interval) -> str:
    return f", 95 % interval {mean.low:.2f} to {mean.high:.2f}" if np.isfinite(mean.low) else ""


def _order(one: str, other: str, found: dict[str, Interval]) -> str:
    first, second = found[one], found[other]
    if not (np.isfinite(first.low) and np.isfinite(second.low)):
        return f"{one} before {other} cannot be said from so few heads"
    if first.high < second.low:
        return f"{one} heads lie before {other} ones"
    if second.high < first.low:
        return f"{one} heads lie behind {other} ones"
    return f"{one} and {other} heads are not shown to be apart"
