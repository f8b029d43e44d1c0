"""The best heads of a treebank beside Clark et al.'s figures."""

import pandas as pd

from training.analysis.published import beside_clark, clark_told


def row(relation, share, *, direction="dependent to head", baseline=0.5, head="encoder.1.2"):
    numbers = {"count": 100, "share": share, "low": share - 0.1, "high": share + 0.1, "baseline": baseline}
    return {"relation": relation, "direction": direction, "head": head, "offset": "+1", "heads_with_role": 1, **numbers}


def test_relations_of_both_schemes_are_found_in_the_better_direction():
    for names in (("det", "obj", "nsubj", "nmod:poss"), ("det", "dobj", "nsubj", "poss")):
        rows = [row(name, 0.6) for name in names] + [row(names[1], 0.7, direction="head to dependent", head="encoder.3.0")]
        found = beside_clark(pd.DataFrame([*rows, row("nsubj:pass", 0.9)])).set_index("clark")
        assert found.index.tolist() == ["det", "dobj", "nsubj", "poss"]
        assert found["relation"].tolist() == list(names)
        assert found.loc["dobj", ["share", "direction", "head"]].tolist() == [0.7, "head to dependent", "encoder.3.0"]
        published = (100 * found[["share_there", "baseline_there"]]).round(1).to_numpy().tolist()
        assert published == [[94.3, 51.7], [86.8, 40.0], [58.5, 45.5], [80.5, 47.7]]
        assert f"{names[3]} 60.0 (50.0) here and 80.5 (47.7) there" in clark_told(found.reset_index())[0]


def test_a_treebank_with_none_of_them_says_nothing():
    found = beside_clark(pd.DataFrame([row("flat", 0.6)]))
    assert len(found) == 0
    assert clark_told(found) == []
