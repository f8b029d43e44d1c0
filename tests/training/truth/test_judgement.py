"""Precision and recall of necessary functions."""

import pytest
import torch

from training.truth.tables import judged

FUNCTIONS = [[0], [2, 3, 5]]


@pytest.mark.parametrize(
    ("mask", "recall", "precision", "exact"),
    [
        ([1, 0, 1, 0, 0, 0], 1.0, 1.0, True),
        ([1, 0, 0, 0, 0, 1], 1.0, 1.0, True),
        ([1, 0, 1, 1, 0, 0], 1.0, 2 / 3, False),  # a second copy is kept in vain
        ([1, 1, 0, 0, 0, 0], 0.5, 0.5, False),
        ([0, 0, 1, 1, 0, 0], 0.5, 0.5, False),
        ([0, 0, 0, 0, 0, 0], 0.0, 0.0, False),
    ],
)
def test_interchangeable_heads_count_once(mask, recall, precision, exact):
    found = judged(torch.tensor(mask), FUNCTIONS)
    assert (found.recall, found.precision, found.exact) == (recall, precision, exact)
