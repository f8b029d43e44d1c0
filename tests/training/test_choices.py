"""What methods decide, on cells whose results are given."""

from pathlib import Path

import pytest
import torch

from gates.closing import NOT_CLOSED
from tests.training.runs import make_pruner
from training.cache import Cell
from training.choices import Choices
from training.methods import Method
from training.refine import SwapSearch

CLOSING = {
    0.01: [1, 2, 3, 4, NOT_CLOSED, NOT_CLOSED, NOT_CLOSED, NOT_CLOSED],
    0.1: [NOT_CLOSED, 3, 2, 1, 8, 7, 6, 5],
    1.0: [8, 7, 6, 5, 4, 3, 2, 1],
}
"""When the gates of a tiny model closed, by the price."""
SECONDS = {0.01: 1.0, 0.1: 10.0, 1.0: 100.0}


class GivenCells:
    """Cells of given results; a mask is judged by ``quality``."""

    seed = 0

    def __init__(self, quality):
        self.pruner, self.quality, self.tried = make_pruner(price=0.01), quality, []

    def learn(self, options):
        assert options["budget"] is None
        price = options.get("price", 0.01)
        found = {"log_alpha": [0.0] * 8, "closing_step": CLOSING[price]}
        return Cell(f"price {price}", Path(), found | {"steps": 16, "seconds": SECONDS[price], "peak_memory_mb": 100 * price})

    def post_hoc(self, mask, splits):
        assert splits == ("select",)
        self.tried.append(mask.tolist())
        quality = self.quality(mask.tolist())
        return Cell("", Path(), {"select_accuracy": quality, "test_accuracy": -quality, "seconds": 0.5})


def kept(mask):
    return mask.nonzero().flatten().tolist()


def choose(cells, budget, prices):
    return Choices(cells, [4, 2], SwapSearch(), {}, prices).choose(Method("lambda"), budget)


def test_the_price_is_chosen_at_each_budget_on_the_selection_split_and_all_are_paid_for():
    cells = GivenCells(lambda mask: mask[0] + 0.1 * mask[4])  # head 0 is kept at 0.1 and 1.0
    found = choose(cells, 2, [0.01, 0.1, 1.0])
    assert found.start.key == "price 0.1"
    assert kept(found.mask) == [0, 4]
    assert found.options["price"] == 0.1
    assert (found.steps, found.seconds, found.peak_memory_mb) == (48, 111 + 3 * 0.5, 100)
    assert torch.equal(found.keep.argsort(descending=True)[:2].sort().values, torch.tensor([0, 4]))
    cells.quality = lambda mask: mask[7]
    assert choose(cells, 4, [0.01, 0.1, 1.0]).start.key == "price 0.01"


def test_of_equal_prices_the_first_is_taken():
    assert choose(GivenCells(lambda mask: 1.0), 2, [1.0, 0.1]).start.key == "price 1.0"


@pytest.mark.parametrize("prices", [[], [0.01]])
def test_one_price_is_not_tried(prices):
    cells = GivenCells(lambda mask: pytest.fail("tried"))
    found = choose(cells, 4, prices)
    assert kept(found.mask) == [4, 5, 6, 7]
    assert (found.steps, found.seconds) == (16, 1.0)
