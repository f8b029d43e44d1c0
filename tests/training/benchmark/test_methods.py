"""Ways over the data are counted as what they are."""

import pytest

from training.benchmark import methods
from training.benchmark.setting import Setting
from training.benchmark.size import Size
from training.scoring.passes import PASSES
from training.scoring.scorers import SCORERS

SETTING = Setting("tiny", None, "cpu", 1, (Size(2, 8),), quick=True)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(methods, "SIZE", Size(2, 8))


@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("gradients", 1, 1), ("attention", 1, 0), ("left-out", 33, 0), ("outputs", 1, 0)]
)
def test_passes_of_a_text(name, forward, backward):
    """32 heads, which are left out one at a time beside the dense model."""
    row = methods._row(SETTING, name)
    assert (row["forward"], row["backward"]) == (forward, backward)
    assert row["over_training"]["median"] > 0


@pytest.mark.parametrize("name", PASSES)
def test_every_way_is_measured(name):
    assert methods._row(SETTING, name)["scores_ms"]["median"] > 0


def test_methods_stand_beside_the_ways_that_they_need():
    found = {name: {method for method, one in SCORERS.items() if methods.behind(one.raws, name)} for name in PASSES}
    assert {"his", "fisher", "hies"} <= found["gradients"]
    assert {"entropy-low-first", "hies"} <= found["attention"]
    assert found["walks"] == {"shapley"}
    assert set().union(*found.values()) == set(SCORERS) - {"random"}
