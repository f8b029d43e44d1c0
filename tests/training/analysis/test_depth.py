"""At which depth roles lie, and what is said of it."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from gates.roles.roles import RULES
from training.analysis.depth import depth_table, depth_told, depths_of


def table(*, layers=6, kind="encoder", **roles):
    """Two heads in each layer; ``roles`` has the layers whose first head has each role."""
    rows = pd.DataFrame({"kind": kind, "layer": np.repeat(range(layers), 2), "head": [0, 1] * layers})
    for rule in RULES:
        rows[f"{rule.name}_has"] = (rows["head"] == 0) & rows["layer"].isin(roles.get(rule.name, []))
    rows["specialised"] = rows[[f"{rule.name}_has" for rule in RULES if rule.specialised]].any(axis=1)
    return rows


def test_depths_are_shares_of_the_way_to_the_last_layer():
    found = depths_of(table(positional=[0, 1], broad=[5]))
    assert found["positional"].tolist() == [0, 0.2]
    assert found["broad"].tolist() == [1]
    assert len(found["background"]) == 10
    assert "syntactic" not in found
    assert depths_of(table(kind="cross", positional=[0])) == {}


def test_the_interval_is_students_over_heads():
    rows = depth_table(depths_of(table(syntactic=[1, 2, 3], rare=[3], coreference=[0, 5]))).set_index("role")
    depths = np.array([0.2, 0.4, 0.6])
    low, high = stats.t.interval(0.95, 2, depths.mean(), depths.std(ddof=1) / 3**0.5)
    assert low < 0 < high < 1
    np.testing.assert_allclose(rows.loc["syntactic", ["depth", "low", "high"]].astype(float), [depths.mean(), 0, high])
    assert rows.loc["rare", ["low", "high"]].isna().all()
    assert rows.loc["coreference", ["low", "high"]].tolist() == [0, 1]


def test_heads_of_one_layer_say_nothing_of_the_spread():
    two = pd.concat([table(positional=[2]), table(positional=[2]).assign(head=lambda rows: rows["head"] + 2)])
    rows = depth_table(depths_of(two)).set_index("role")
    assert rows.loc["positional", "heads"] == 2
    assert rows.loc["positional", ["low", "high"]].isna().all()


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (
            {"positional": range(4), "syntactic": range(14, 18), "coreference": range(26, 30)},
            "positional heads lie before syntactic ones and syntactic heads lie before coreference ones",
        ),
        ({"positional": range(26, 30), "syntactic": range(4)}, "positional heads lie behind syntactic ones"),
        ({"positional": [0, 15, 29], "syntactic": [0, 14, 29]}, "positional and syntactic heads are not shown to be apart"),
        ({"positional": [0], "syntactic": [3, 4]}, "positional before syntactic cannot be said from so few heads"),
    ],
)
def test_the_order_of_the_lecture_notes(roles, said):
    assert said in " ".join(depth_told(depths_of(table(layers=30, **roles))))


def test_what_is_missing_is_told():
    told = depth_told(depths_of(table(syntactic=[1, 2])))
    assert told[-1] == "Of positional and coreference heads there are none, so that their depth is not tested."
    assert depth_told(depths_of(table())) == []
