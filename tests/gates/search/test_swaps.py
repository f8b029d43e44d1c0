"""Swaps against exhaustive search on small quadratic losses."""

from itertools import combinations

import pytest
import torch

from gates.errors import GateError
from gates.options import LEAST_PASSES
from gates.search.swaps import Limits, refine_by_swaps


def quadratic(seed: int, size: int):
    """A convex loss of a mask (the same on every share of the data) and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T / size

    def loss(mask, share=1.0):
        missing = 1 - mask.double()
        return float(missing @ matrix @ missing)

    def gradient(mask):
        return -2 * matrix @ (1 - mask.double())

    return loss, gradient


def masks(size, keep):
    return [torch.zeros(size).index_fill(0, torch.tensor(chosen), 1.0) for chosen in combinations(range(size), keep)]


@pytest.mark.parametrize("seed", range(8))
def test_it_ends_near_the_best_mask_of_all(seed):
    loss, gradient = quadratic(seed, 10)
    start = max(masks(10, 4), key=loss)
    found = refine_by_swaps(start, loss=loss, gradient=gradient, passes=200)
    assert found.mask.sum() == 4
    assert list(found.losses) == sorted(set(found.losses), reverse=True)
    assert found.losses[-1] == pytest.approx(loss(found.mask))
    floor = min(map(loss, masks(10, 4)))
    assert found.losses[-1] - floor <= 0.2 * (found.losses[0] - floor)


@pytest.mark.parametrize("seed", range(8))
def test_from_a_middling_mask_it_comes_to_one_of_the_very_best(seed):
    loss, gradient = quadratic(seed, 10)
    ranked = sorted(masks(10, 4), key=loss)
    found = refine_by_swaps(ranked[len(ranked) // 2], loss=loss, gradient=gradient, passes=200)
    assert sum(loss(mask) < found.losses[-1] for mask in ranked) <= 2  # of 210


def test_swaps_lead_from_the_first_mask_to_the_last():
    loss, gradient = quadratic(3, 10)
    start = torch.tensor([1.0] * 4 + [0.0] * 6)
    found = refine_by_swaps(start, loss=loss, gradient=gradient)
    mask = start.clone()
    for (added, dropped), value in zip(found.swaps, found.losses[1:], strict=True):
        assert mask[added] == 0
        assert mask[dropped] == 1
        mask[added], mask[dropped] = 1, 0
        assert loss(mask) == pytest.approx(value)
    assert torch.equal(mask, found.mask)
    assert found.swaps


def test_passes_are_counted_by_share_and_the_limit_holds():
    loss, gradient = quadratic(1, 40)
    shares = []

    def counted(mask, share):
        shares.append(share)
        assert mask.sum() == 10
        return loss(mask)

    start = torch.tensor([1.0] * 10 + [0.0] * 30)
    found = refine_by_swaps(start, loss=counted, gradient=gradient, passes=9)
    assert found.passes == pytest.approx(sum(shares))
    assert 9 <= found.passes < 9 + 4 + 1  # a race that has begun is run to its end
    assert len(set(shares)) == 3


def test_the_race_is_decided_by_the_parts_and_the_end_by_the_whole():
    """Where a part of the data misleads, no swap that the whole data refuses is taken."""
    loss, gradient = quadratic(5, 12)

    def misleading(mask, share):
        return loss(mask) if share == 1 else -loss(mask)

    start = torch.tensor([1.0] * 6 + [0.0] * 6)
    found = refine_by_swaps(start, loss=misleading, gradient=gradient, passes=100)
    assert list(found.losses) == sorted(found.losses, reverse=True)


def test_the_best_mask_stays():
    loss, gradient = quadratic(2, 6)
    best = min(masks(6, 3), key=loss)
    found = refine_by_swaps(best, loss=loss, gradient=gradient, passes=100)
    assert torch.equal(found.mask, best)
    assert found.swaps == ()


def test_swaps_stay_within_their_group_and_leave_the_minimum():
    weights = torch.arange(8, dtype=torch.float64)  # later heads are worth more

    def loss(mask, share):
        return float(-(weights * mask).sum())

    def gradient(mask):
        return -weights

    groups = torch.tensor([0] * 4 + [1] * 4)
    start = torch.tensor([1.0, 1, 0, 0, 1, 0, 0, 0])
    found = refine_by_swaps(start, loss=loss, gradient=gradient, limits=Limits(within=groups), passes=100)
    assert found.mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    found = refine_by_swaps(
        start, loss=loss, gradient=gradient, limits=Limits(layer_index=groups, minimum_per_layer=1), passes=100
    )
    assert found.mask.tolist() == [0, 0, 0, 1, 0, 0, 1, 1]


def test_a_search_without_tries_is_refused():
    loss, gradient = quadratic(0, 4)
    with pytest.raises(GateError, match="at least 6"):
        refine_by_swaps(torch.ones(4), loss=loss, gradient=gradient, passes=LEAST_PASSES - 1)


def test_the_shortest_search_tries_a_swap():
    """One pass for the mask, at most four for the race, and one for the winner."""
    weights = torch.arange(20, dtype=torch.float64)
    start = torch.tensor([1.0] * 10 + [0.0] * 10)
    found = refine_by_swaps(
        start, loss=lambda mask, share: float(-(weights * mask).sum()), gradient=lambda mask: -weights, passes=LEAST_PASSES
    )
    assert len(found.swaps) == 1
    assert found.passes == LEAST_PASSES
