"""Swaps against exhaustive search on small quadratic losses."""

from itertools import combinations

import pytest
import torch

from gates.errors import GateError
from gates.swap import refine_by_swaps


def quadratic(seed: int, size: int):
    """A convex loss of a mask, its gradient, and the best mask of every size by trying all."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(size, size, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T / size

    def loss(mask):
        missing = 1 - mask.double()
        return float(missing @ matrix @ missing)

    def gradient(mask):
        return -2 * matrix @ (1 - mask.double())

    return loss, gradient


def best(loss, size, keep):
    masks = (torch.zeros(size).index_fill(0, torch.tensor(chosen), 1.0) for chosen in combinations(range(size), keep))
    return min(loss(mask) for mask in masks)


@pytest.mark.parametrize("seed", range(6))
def test_it_ends_where_no_promising_swap_helps_and_near_the_best_mask(seed):
    loss, gradient = quadratic(seed, 10)
    start = torch.zeros(10)
    start[:4] = 1
    found = refine_by_swaps(start, loss=loss, gradient=gradient, evaluations=200, patience=100)
    assert found.mask.sum() == 4
    assert list(found.losses) == sorted(found.losses, reverse=True)
    assert loss(found.mask) == pytest.approx(found.losses[-1])
    floor = best(loss, 10, 4)
    assert found.losses[-1] - floor <= 0.5 * (found.losses[0] - floor) + 1e-12


def test_losses_are_counted_and_the_limit_holds():
    loss, gradient = quadratic(1, 12)
    calls = []

    def counted(mask):
        calls.append(mask)
        return loss(mask)

    found = refine_by_swaps(torch.tensor([1.0] * 3 + [0.0] * 9), loss=counted, gradient=gradient, evaluations=5)
    assert found.evaluations == len(calls) <= 5
    assert all(mask.sum() == 3 for mask in calls)


def test_a_mask_without_better_neighbours_stays():
    loss, gradient = quadratic(2, 6)
    best_mask = min(
        (torch.zeros(6).index_fill(0, torch.tensor(chosen), 1.0) for chosen in combinations(range(6), 3)), key=loss
    )
    found = refine_by_swaps(best_mask, loss=loss, gradient=gradient, evaluations=100, patience=100)
    assert torch.equal(found.mask, best_mask)
    assert found.swaps == ()


def test_swaps_stay_within_their_group_and_leave_the_minimum():
    size = 8
    weights = torch.arange(size, dtype=torch.float64)  # later heads are worth more

    def loss(mask):
        return float(-(weights * mask).sum())

    def gradient(mask):
        return -weights

    groups = torch.tensor([0] * 4 + [1] * 4)
    start = torch.tensor([1.0, 1, 0, 0, 1, 0, 0, 0])
    found = refine_by_swaps(start, loss=loss, gradient=gradient, within=groups, evaluations=100)
    assert found.mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    found = refine_by_swaps(
        start, loss=loss, gradient=gradient, layer_index=groups, minimum_per_layer=1, evaluations=100, patience=100
    )
    assert found.mask[:4].sum() == 1
    assert found.mask[4:].sum() == 2
    assert loss(found.mask) == -(3 + 7 + 6)


def test_a_search_without_tries_is_refused():
    loss, gradient = quadratic(0, 4)
    with pytest.raises(GateError, match="at least 2"):
        refine_by_swaps(torch.ones(4), loss=loss, gradient=gradient, evaluations=1)
