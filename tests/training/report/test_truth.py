"""Known truth as a table of ticks."""

import numpy as np
import pandas as pd
import pytest

from gates.errors import GateError
from training.report.figures import caption, recoveries, ticks
from training.report.page import write_report
from training.report.reading import read_contents
from training.truth.tables import CROSS, TICK


def table():
    """Learned recovers both programs; his one of them in one seed of two; random none."""
    found = {("learned", "a"): [1, 1], ("learned", "b"): [1, 1], ("his", "a"): [1, 0], ("random", "b"): [0, 0]}
    found |= {("his", "b"): [0, 0], ("random", "a"): [0, 0]}
    return pd.DataFrame(
        {
            "program": program, "method": method, "seed": seed, "recovered": bool(hit), "precision": 0.5 + 0.5 * hit,
            "recall": 0.25 + 0.75 * hit, "smallest": 2 + 3 * (not hit) if method != "random" else np.nan,
        }
        for (method, program), hits in found.items()
        for seed, hit in enumerate(hits)
    )  # fmt: skip


def test_every_cell_says_in_how_many_seeds_all_was_found():
    axes = ticks(table()).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["learned", "his", "random"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a", "b", "exact", "precision", "recall"]
    at = {}
    for text in axes.texts:
        x, y = text.get_position()
        at.setdefault((round(y), round(x)), []).append(text.get_text())
    assert at[0, 0] == at[0, 1] == [TICK, "2"]
    assert at[1, 0] == ["1/2", "3.5"]
    assert at[1, 1] == [CROSS, "5"]
    assert at[2, 0] == at[2, 1] == [CROSS]  # it survives at no budget
    assert [at[1, column] for column in (3, 4, 5)] == [["0.25"], ["0.62"], ["0.44"]]
    shades = axes.images[0].get_array()
    assert shades[:, :2].tolist() == [[1, 1], [0.5, 0], [0, 0]]
    assert caption(table()) == "Exactly the necessary heads in every seed: learned in 2 of 2 programs. In none: random."


def test_recoveries_are_those_at_as_many_heads_as_are_needed():
    """The function survives at 4 and 3 heads, not at 2, and by luck at 1."""
    rows = [(4, True, 0.5, 1.0, True), (3, False, 0.5, 1.0, True), (2, False, 0.5, 0.5, False), (1, False, 1.0, 0.5, True)]
    truth = pd.DataFrame(rows, columns=["budget", "exact", "precision", "recall", "survives"])
    truth = truth.assign(seed=0, method="his", needed=2)
    (row,) = recoveries(truth.iloc[::-1]).to_dict("records")
    assert row == {
        "program": "", "method": "his", "seed": 0, "recovered": False, "precision": 0.5, "recall": 0.5, "smallest": 3
    }  # fmt: skip
    assert np.isnan(recoveries(truth.assign(survives=False))["smallest"].item())
    with pytest.raises(GateError, match="no column 'needed'"):
        recoveries(truth.drop(columns="needed"))


def test_a_report_of_known_truth_opens_with_the_ticks(tmp_path):
    """A benchmark over several programs leaves nothing but this table."""
    table().rename(columns={"recovered": "exact"}).assign(budget=2, needed=2, survives=True).to_csv(
        tmp_path / "truth.csv", index=False
    )
    contents = read_contents(tmp_path)
    write_report([contents], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    lead = page[page.index('<figure class="lead"') : page.index("</figure>")]
    assert caption(contents.truth) in lead
    assert TICK in lead
    assert "There are no results yet." not in lead
    pd.DataFrame({"seed": [0], "method": ["his"]}).to_csv(tmp_path / "truth.csv", index=False)
    with pytest.raises(GateError, match="no column 'budget'"):
        read_contents(tmp_path)
