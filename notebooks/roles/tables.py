"""``python notebooks/roles/tables.py``: write the tables of docs/explanation/roles.md that follow from others.

``depth.csv`` has the depth of the heads of each role, ``clark.csv`` compares the best heads with Clark et al. (2019), and
``survival.csv`` shows which roles the methods of four comparisons keep.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from gates.roles.roles import RULES
from training.analysis.survival import survival_of_roles
from training.stats.significance import interval

RESULTS = Path(__file__).parents[1] / "results"
CLARK = {
    "det": (("det",), 94.3, 51.7),
    "dobj": (("dobj", "obj"), 86.8, 40.0),
    "nsubj": (("nsubj",), 58.5, 45.5),
    "poss": (("poss", "nmod:poss"), 80.5, 47.7),
    "amod": (("amod",), 75.6, 68.3),
    "aux": (("aux",), 81.1, 71.5),
    "advmod": (("advmod",), 48.8, 40.2),
    "conj": (("conj",), 53.3, 26.8),
}
"""Relation: its names in treebanks, and in percent the best head and the best fixed offset of BERT-base (table 1)."""


def depth_table(roles: pd.DataFrame) -> pd.DataFrame:
    """Return the mean depth of the self-attention heads of each role, from 0 (first layer) to 1 (last), with its interval.

    Args:
        roles: The table ``roles.csv``, a row for each head.
    """
    own = roles[roles["kind"] != "cross"]
    depth = own["layer"] / own.groupby("kind")["layer"].transform("max").clip(lower=1)
    members = {rule.name: own[f"{rule.name}_has"].astype(bool) for rule in RULES} | {"background": ~own["specialised"]}
    rows = []
    for role, has in members.items():
        if has.any():
            found = interval(depth[has].to_numpy())
            low, high = (max(found.low, 0), min(found.high, 1)) if found.std > 0 else (np.nan, np.nan)
            rows.append({"role": role, "heads": found.seeds, "depth": found.mean, "low": low, "high": high})
    return pd.DataFrame(rows)


def clark_table(relations: pd.DataFrame) -> pd.DataFrame:
    """Return the best head of every relation in :data:`CLARK`, in the better direction, with the published shares.

    Args:
        relations: The table ``relations.csv``, a row for each relation and direction.
    """
    rows = []
    for clark, (names, head, offset) in CLARK.items():
        own = relations[relations["relation"].isin(names)]
        if len(own):
            best = own.loc[own["share"].idxmax()].drop("heads_with_role")
            rows.append({"clark": clark, **best, "share_there": head / 100, "baseline_there": offset / 100})
    return pd.DataFrame(rows)


def survival_table() -> pd.DataFrame:
    """Return the share of specialised and of other heads that each method keeps, on four tasks."""
    roles = str(RESULTS / "roles" / "roles.csv")
    found = {
        task: survival_of_roles(str(RESULTS / f"{task}_seeds"), roles).tables["survival"]
        for task in ("agreement", "sick", "sst2", "trec")
    }
    table = pd.concat(found, names=["comparison"]).reset_index("comparison")
    return table[~table["method"].str.endswith("+refit")]  # which has the heads of the method without it


if __name__ == "__main__":
    folder = RESULTS / "roles"
    depth_table(pd.read_csv(folder / "roles.csv")).to_csv(folder / "depth.csv", index=False)
    clark_table(pd.read_csv(folder / "relations.csv")).to_csv(folder / "clark.csv", index=False)
    survival_table().to_csv(folder / "survival.csv", index=False)
