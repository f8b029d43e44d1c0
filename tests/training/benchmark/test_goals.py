import pytest

from training.benchmark.goals import Goal, judge, number


def spread(median):
    return {"median": median, "low": 0.0, "high": 99.0}


@pytest.mark.parametrize(
    ("sense", "worst", "reached"), [("at most", 1.5, 2), ("at least", 0.9, 2)], ids=["at most", "at least"]
)
def test_the_bound_itself_is_kept_and_the_worst_row_counts(sense, worst, reached):
    rows = [{"a": spread(0.9)}, {"a": 1.2}, {"a": spread(1.5)}, {"a": None}, {}]
    [found] = judge([Goal("a", "a", 1.2, sense)], rows, "cpu")
    assert (found.worst, found.rows, found.reached, found.verdict) == (worst, 3, reached, "missed")
    [found] = judge([Goal("a", "a", worst, sense)], rows, "cpu")
    assert found.verdict == "met"


def test_goals_of_some_rows_and_of_a_device():
    rows = [{"how": "eager", "a": 1.0}, {"how": "onnx", "a": 5.0}]
    goals = [Goal("eager", "a", 2, where=(("how", "eager"),)), Goal("on a GPU", "a", 2, device="cuda")]
    assert [found.goal.text for found in judge(goals, rows, "cpu")] == ["eager"]
    assert [(found.goal.text, found.verdict) for found in judge(goals, rows, "cuda")] == [
        ("eager", "met"),
        ("on a GPU", "missed"),
    ]


def test_what_was_not_measured_is_neither_met_nor_missed():
    for rows in ([{"a": None}, {"b": 2.0}], []):
        [found] = judge([Goal("a", "a", 1.0)], rows, "cpu")
        assert (found.worst, found.rows, found.verdict) == (None, 0, "not measured")
    assert [number(cell) for cell in (None, "yes", True, {"low": 1.0})] == [None] * 4
