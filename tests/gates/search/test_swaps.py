"""Swaps against exhaustive search on small quadratic losses."""

from itertools import combinations, product

import pytest
import torch

from gates.errors import GateError
from gates.options import LEAST_PASSES
from gates.search.swaps import CANDIDATES, Limits, refine_by_swaps


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


def test_a_swap_that_changes_nothing_is_not_taken():
    start = torch.tensor([1.0, 0.0, 1.0, 0.0])
    slope = torch.tensor([0.0, -1.0, 0.0, -1.0])
    found = refine_by_swaps(start, loss=lambda mask, share: 1.0, gradient=lambda mask: slope)
    assert found.swaps == ()
    assert found.losses == (1.0,)
    assert torch.equal(found.mask, start)


def test_only_swaps_that_lower_the_loss_to_first_order_are_tried():
    tried = []

    def loss(mask, share):
        tried.append(mask.tolist())
        return float(len(tried))

    start = torch.tensor([1.0, 1.0, 0.0, 0.0])
    found = refine_by_swaps(start, loss=loss, gradient=lambda mask: torch.tensor([-1.0, -0.5, -1.0, -0.75]))
    assert found.passes == 1 + len(tried[1:]) == 3
    assert sorted(tried[1:]) == [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    tried.clear()
    assert refine_by_swaps(start, loss=loss, gradient=lambda mask: torch.zeros(4)).passes == 1


@pytest.mark.parametrize("levels", [1, 3, 50])
def test_the_most_promising_pairs_race_and_no_head_is_in_more_than_two(levels):
    """Of equally promising ones, the earlier head to add goes first, then the earlier to give up."""
    start = torch.tensor([1.0] * 25 + [0.0] * 25)
    slope = torch.arange(50) % levels - 100.0 * (start == 0)
    tried = []

    def loss(mask, share):
        if share == 1 / 8:
            tried.append((int((mask > start).nonzero()), int((mask < start).nonzero())))
        return 1.0

    refine_by_swaps(start, loss=loss, gradient=lambda mask: slope)
    assert len(tried) == CANDIDATES
    better = {}
    for pair in sorted(product(range(25, 50), range(25)), key=lambda pair: (float(slope[pair[0]] - slope[pair[1]]), *pair)):
        if pair in tried:
            assert pair == tried[sum(better.values()) // 2]
            better |= {gate: better.get(gate, 0) + 1 for gate in pair}
        elif sum(better.values()) < 2 * CANDIDATES:
            assert any(better.get(gate) == 2 for gate in pair)
    assert max(better.values()) == 2


def test_a_refinement_shares_nothing_with_the_mask_it_came_from():
    start = torch.ones(4, requires_grad=True)
    found = refine_by_swaps(start, loss=lambda mask, share: 1.0, gradient=torch.zeros_like)
    assert not found.mask.requires_grad
    assert found.mask.data_ptr() != start.data_ptr()


def test_layers_alone_are_no_limit_and_a_minimum_needs_them():
    mask, layers = torch.tensor([1.0, 0, 1, 0]), torch.tensor([0, 0, 1, 1])
    assert torch.equal(Limits(layer_index=layers).allow(mask), Limits().allow(mask))
    assert int(Limits(layer_index=layers, minimum_per_layer=1).allow(mask).sum()) == 2
    with pytest.raises(GateError, match="a minimum of 1 heads per layer needs the layer of each gate"):
        Limits(minimum_per_layer=1)
