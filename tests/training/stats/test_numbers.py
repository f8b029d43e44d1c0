"""Numbers as people read them."""

import re

import pandas as pd

from training.stats.numbers import signed
from training.stats.verdict import verdict


def test_a_difference_never_prints_as_a_zero_with_a_sign():
    shown = {-3.21: "-3.2", 0.05: "+0.1", -0.04: "-0.04", 0.0049: "+0.005", -1e-12: "0.0", 0.0: "0.0"}
    assert {value: signed(value) for value in shown} == shown
    assert signed(-0.001, 2) == "-0.001"
    assert (signed(-0.0), signed(-0.0, 2)) == ("0.0", "0.00")


def test_a_verdict_never_prints_minus_zero():
    """The rival is behind in every seed, by 0.02 to 0.04 points."""
    means = {"dense": (72, 0.9), "his": (9, 0.8003), "learned": (9, 0.8)}
    rows = [
        {"stage": "retrained", "method": name, "budget": budget, "seeds": 3, "mean": mean, "low": 0.7, "high": 0.9}
        for name, (budget, mean) in means.items()
    ]
    pair = {"stage": "retrained", "budget": 9, "method": "his", "rival": "learned", "seeds": 3, "ahead": 3, "behind": 0}
    tests = pd.DataFrame([pair | {"p_holm": float("nan"), "difference": 0.0003, "least": 0.0002, "most": 0.0004}])
    said = verdict(pd.DataFrame(rows), tests)
    assert "Behind in every seed: learned (-0.03, from -0.02 to -0.04)." in said
    assert not re.search(r"[-+]0\.0+(?!\d)", said)
