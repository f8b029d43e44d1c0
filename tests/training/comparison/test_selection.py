"""What methods decide, on cells whose results are given."""

from pathlib import Path

import pytest
import torch

from gates.families.closing import NOT_CLOSED
from gates.search.sampled_masks import spread_ranks
from tests.training.runs import make_pruner
from training.comparison.cache import Cell
from training.comparison.methods import Method
from training.comparison.selection import Choices
from training.scoring.mask_search import DrawSearch, SwapSearch

CLOSING = {
    0.01: [1, 2, 3, 4, NOT_CLOSED, NOT_CLOSED, NOT_CLOSED, NOT_CLOSED],
    0.1: [NOT_CLOSED, 3, 2, 1, 8, 7, 6, 5],
    1.0: [8, 7, 6, 5, 4, 3, 2, 1],
}
"""When the gates of a tiny model closed, by the price."""
LOG_ALPHA = [0.1, -2.0, 3.0, 0.5, -0.5, 1.0, -1.0, 0.2]
SECONDS = {0.01: 1.0, 0.1: 10.0, 1.0: 100.0}


class GivenCells:
    """Cells of given results; a mask is judged by ``quality``."""

    seed = 0

    def __init__(self, quality):
        self.pruner, self.quality, self.tried, self.searched = make_pruner(price=0.01), quality, [], []

    def learn(self, options):
        price = options.get("price", 0.01)
        found = {"log_alpha": LOG_ALPHA, "closing_step": CLOSING[price], "mask": [float(value > 0) for value in LOG_ALPHA]}
        return Cell(f"price {price}", Path(), found | {"steps": 16, "seconds": SECONDS[price], "peak_memory_mb": 100 * price})

    def dense(self):
        return Cell("dense", Path(), {})

    def draw(self, mask, scores, budget, search, *, start, options):
        return self._searched("draw", mask, scores, start.key)

    def swap(self, mask, budget, search, *, start, options):
        return self._searched("swap", mask, None, start.key)

    def _searched(self, how, mask, scores, start):
        """Another mask: the same, turned by one place."""
        self.searched.append((how, kept(mask), scores, start))
        return Cell(how, Path(), {"mask": mask.roll(1).tolist(), "steps": 0, "seconds": 5.0, "peak_memory_mb": 500.0})

    def post_hoc(self, mask, splits):
        assert splits == ("select",)
        self.tried.append(mask.tolist())
        quality = self.quality(mask.tolist())
        return Cell("", Path(), {"select_accuracy": quality, "test_accuracy": -quality, "seconds": 0.5})


def kept(mask):
    return mask.nonzero().flatten().tolist()


def choose(cells, budget, prices):
    return Choices(cells, [4, 2], SwapSearch(), DrawSearch(), {}, prices).choose(Method("lambda"), budget)


def test_the_price_is_chosen_at_each_budget_on_the_selection_split_and_all_are_paid_for():
    cells = GivenCells(lambda mask: mask[0] + 0.1 * mask[4])  # head 0 is kept at 0.1 and 1.0
    found = choose(cells, 2, [0.01, 0.1, 1.0])
    assert found.options["budget"] is None
    assert found.start.key == "price 0.1"
    assert kept(found.mask) == [0, 4]
    assert found.options["price"] == 0.1
    assert (found.steps, found.seconds, found.peak_memory_mb) == (48, 111 + 3 * 0.5, 100)
    assert torch.equal(found.keep.argsort(descending=True)[:2].sort().values, torch.tensor([0, 4]))
    cells.quality = lambda mask: mask[7]
    assert choose(cells, 4, [0.01, 0.1, 1.0]).start.key == "price 0.01"


def test_kinds_without_a_budget_have_no_price():
    """They stay whole, and are to train as they will be used, as with every other method."""
    cells, prices = GivenCells(lambda mask: 1.0), []
    cells.learn = lambda options, learn=cells.learn: prices.append(options["price"]) or learn({})
    choices = Choices(cells, [{"encoder": 4}], SwapSearch(), DrawSearch(), {}, [0.1, {"encoder": 1.0}])
    choices.choose(Method("lambda"), {"encoder": 4})
    Choices(cells, [{"encoder": 4}], SwapSearch(), DrawSearch(), {}).choose(Method("lambda"), {"encoder": 4})
    assert prices == [{"encoder": 0.1}, {"encoder": 1.0}, {"encoder": 0.01}]


def test_of_equal_prices_the_first_is_taken():
    assert choose(GivenCells(lambda mask: 1.0), 2, [1.0, 0.1]).start.key == "price 1.0"


@pytest.mark.parametrize("prices", [[], [0.01]])
def test_one_price_is_not_tried(prices):
    cells = GivenCells(lambda mask: pytest.fail("tried"))
    found = choose(cells, 4, prices)
    assert kept(found.mask) == [4, 5, 6, 7]
    assert (found.steps, found.seconds) == (16, 1.0)


@pytest.mark.parametrize(
    ("method", "logits"),
    [("learned", True), ("dsp", True), ("straight-through", True), ("linear-l1", False), ("lambda", False)],
)
def test_draws_are_around_log_alpha_where_it_is_a_logit_and_else_around_ranks(method, logits):
    cells = GivenCells(lambda mask: 1.0)
    choices = Choices(cells, [4, 2], SwapSearch(), DrawSearch(), {})
    plain, found = (choices.choose(Method.parse(name), 2) for name in (method, f"{method}+draws"))
    ((how, start, scores, weights),) = cells.searched
    assert (how, start, weights) == ("draw", kept(plain.mask), plain.start.key)
    torch.testing.assert_close(scores, torch.tensor(LOG_ALPHA) if logits else spread_ranks(plain.keep))
    assert torch.equal(found.mask, plain.mask.roll(1))
    assert found.keep is None
    assert (found.steps, found.seconds, found.peak_memory_mb) == (plain.steps, plain.seconds + 5.0, 500.0)


def test_swaps_start_from_the_best_draw():
    cells = GivenCells(lambda mask: 1.0)
    method = Method.parse("learned+swap+draws")
    assert method.name == "learned+draws+swap"
    assert method.is_ours
    found = Choices(cells, [4, 2], SwapSearch(), DrawSearch(), {}).choose(method, 2)
    (_, first, *_), (how, second, *_) = cells.searched
    assert first == [2, 5]
    assert (how, second) == ("swap", [3, 6])
    assert kept(found.mask) == [4, 7]


def test_searches_for_a_mask_run_on_the_weights_that_it_is_for():
    """Those of the learned model where training goes on from them, and the dense ones where they are evaluated as they are."""
    cells = GivenCells(lambda mask: 1.0)
    choices, method = Choices(cells, [4, 2], SwapSearch(), DrawSearch(), {}), Method.parse("learned+draws+swap")
    for post_hoc in (False, True):
        choices.choose(method, 2, post_hoc=post_hoc)
    assert [(how, start) for how, _, _, start in cells.searched] == [
        ("draw", "price 0.01"),
        ("swap", "price 0.01"),
        ("draw", "dense"),
        ("swap", "dense"),
    ]
