"""What is said of how far gates had decided themselves."""

import numpy as np
import pandas as pd

from training.stats.tables import summarise
from training.stats.verdict import HINT, closed_by_gates_sentence, verdict

ROWS = [
    ("learned", 9, 0, 0.96), ("learned", 9, 1, 1.0), ("learned", 4, 0, 1.0), ("learned", 4, 1, 1.0),
    ("learned+swap", 9, 0, 0.96), ("learned+swap", 9, 1, 1.0), ("learned+swap", 4, 0, 1.0), ("learned+swap", 4, 1, 1.0),
    ("his", 9, 0, np.nan), ("his", 4, 0, np.nan),
]  # fmt: skip


def summary_of(rows):
    table = pd.DataFrame(rows, columns=["method", "budget", "seed", "closed_by_gates"]).assign(test_accuracy=0.5)
    stages = [table.assign(stage=stage) for stage in ("post hoc", "retrained")]
    return summarise(pd.concat(stages), "accuracy")


def test_methods_of_the_same_gates_are_said_together_once():
    assert closed_by_gates_sentence(summary_of(ROWS)) == (
        "Share of the closed heads that training itself closed; the rank of the gates closed the others (mean over the seeds "
        "with a learned mask): "
        "learned and learned+swap 98 % at 9 heads and 100 % at 4 heads."
    )


def test_methods_of_other_gates_are_told_apart_and_a_low_share_has_a_hint():
    said = closed_by_gates_sentence(summary_of([*ROWS, ("learned(once=true)", 9, 0, 0.5)]), "group")
    assert said.startswith("Share of the closed groups that training itself closed; ")
    assert "4 groups; learned(once=true) 50 % at 9 groups." in said
    assert said.endswith(f"Where it is under 90 %, {HINT}.")


def test_tables_that_say_nothing_of_it_are_read_all_the_same():
    assert closed_by_gates_sentence(summary_of(ROWS[-2:])) == ""
    assert closed_by_gates_sentence(summary_of(ROWS).drop(columns="closed_by_gates")) == ""


def test_the_verdict_says_it_after_its_stages():
    nothing = pd.DataFrame(columns=["stage", "budget", "method", "rival", "seeds"])
    text = verdict(summary_of(ROWS), nothing)
    assert "learned and learned+swap 98 % at 9 heads" in text.splitlines()[-1]
    assert "by themselves" not in verdict(summary_of(ROWS).drop(columns="closed_by_gates"), nothing)
