"""How a campaign judges its cases."""

import pytest

from tests.training.campaign import CLEAR, HANG, SILENT, SURVIVED, TRACEBACK, Ended


@pytest.mark.parametrize(
    ("ended", "right", "outcome"),
    [
        (Ended(0), True, SURVIVED),
        (Ended(0), False, SILENT),
        (Ended(None, hangs=True), True, HANG),
        (Ended(2, err="error: 'a.csv' is damaged\n"), True, CLEAR),
        (Ended(2, err="a note\nerror: 'a.csv' is damaged\n"), True, CLEAR),
        (Ended(2, err="error: something is damaged\n"), True, TRACEBACK),  # which file?
        (Ended(2, err="error: 'a.csv'\nerror: 'a.csv'\n"), True, TRACEBACK),
        (Ended(2, err="error: 'a.csv'\nand more\n"), True, TRACEBACK),
        (Ended(2, err="Traceback\nerror: 'a.csv'\n"), True, TRACEBACK),
        (Ended(2), True, TRACEBACK),
        (Ended(1, err="error: 'a.csv'\n"), True, TRACEBACK),
        (Ended(None, raised="ValueError"), True, TRACEBACK),
    ],
)
def test_every_ending_is_judged(ended, right, outcome):
    assert ended.outcome(lambda: right, ["a.csv"]) == outcome
