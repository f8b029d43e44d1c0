"""What docs/results.md says beside its tables is in notebooks/results."""

from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
PAGE = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
RESULTS = ROOT / "notebooks" / "results"


def test_lengths_of_training_on():
    table = pd.read_csv(RESULTS / "agreement_lengths" / "lengths.csv")
    assert (table.groupby(["method", "length"])["seed"].nunique() == 5).all()
    found = 100 * table.groupby(["length", "method"])["test_accuracy"].mean()
    as_long, paid, shown = found["as long as scores"], found["as many passes as learned"], found["as in the table"]
    behind, ahead = shown["hies"] - as_long["learned"], as_long["learned"] - shown["his"]
    assert f"it has {as_long['learned']:.1f}, {behind:.1f} behind HIES and {ahead:.1f} ahead of HIS" in PAGE
    steps = table[table["length"] == "as many passes as learned"].groupby("method")["steps_of_weights"].first()
    assert (
        f"HIES has {steps['hies']} steps left and comes to {paid['hies']:.1f}, HIS has {steps['his']} and comes to "
        f"{paid['his']:.1f}, beside {shown['learned']:.1f} of `learned`"
    ) in PAGE


def test_passes_that_scores_pay_for():
    """What is left of the passes of all steps, in steps of 32 examples forwards and backwards."""
    summary = pd.read_csv(RESULTS / "agreement_seeds_retrained" / "summary.csv").set_index(["stage", "method"])
    per_step = 32 * 3
    for method, left in (("hies", 117), ("his", 170)):
        row = summary.loc[("post hoc", method)]
        assert round(234 - (row["forward_examples"] + 2 * row["backward_examples"]) / per_step) == left
    swap = summary.loc[("post hoc", "learned+swap")]
    assert swap["forward_examples"] + 2 * swap["backward_examples"] > 234 * per_step


def test_rates_of_the_gates():
    table = pd.read_csv(RESULTS / "gate_rate" / "rates.csv")
    loss = table.groupby(["task", "heads", "gate_learning_rate"])["select_loss"].mean().unstack()
    for text in (
        "at 9 heads of agreement from {:.3f} to {:.3f}".format(*loss.loc[("agreement", 9)]),
        "at 18 of SICK from {:.3f} to {:.3f}".format(*loss.loc[("sick", 18)]),
        "at 18 of agreement ({:.3f} to {:.3f})".format(*loss.loc[("agreement", 18)]),
        "at 9 of SICK ({:.3f} to {:.3f})".format(*loss.loc[("sick", 9)]),
    ):
        assert text in PAGE
