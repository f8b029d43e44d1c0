"""Swaps against exhaustive search on small quadratic losses, and what becomes of the true loss where there is noise."""

import math
from itertools import combinations, product
from statistics import NormalDist

import pytest
import torch

from gates.errors import GateError
from gates.gating.budget import counts_by_site, mask_within
from gates.gating.latency import TimeLimit
from gates.options import MIN_SWAP_PASSES
from gates.search.swaps import CANDIDATES, Limits, paired_gain, refine_by_swaps
from tests.gates.latency_tables import drawn_table


def refine(start, *, loss, gradient, **options):
    """A search without noise: every example of either half has the same loss."""
    return refine_by_swaps(start, gradient=gradient, loss=loss, losses=lambda mask: torch.full((4,), loss(mask, 1)), **options)


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


@pytest.mark.parametrize("seed", range(4))
def test_it_ends_near_the_best_mask_of_all(seed):
    loss, gradient = quadratic(seed, 10)
    start = max(masks(10, 4), key=loss)
    found = refine(start, loss=loss, gradient=gradient, passes=200)
    assert found.mask.sum() == 4
    assert list(found.losses) == sorted(set(found.losses), reverse=True)
    assert found.losses[-1] == pytest.approx(loss(found.mask))
    floor = min(map(loss, masks(10, 4)))
    assert found.losses[-1] - floor <= 0.2 * (found.losses[0] - floor)


def test_passes_are_counted_by_share_and_the_limit_holds():
    loss, gradient = quadratic(1, 40)
    shares, slopes = [], []

    def counted(mask, share):
        shares.append(share)
        assert mask.sum() == 10
        return loss(mask)

    def differentiated(mask):
        slopes.append(mask)
        return gradient(mask)

    start = torch.tensor([1.0] * 10 + [0.0] * 30)
    found = refine(start, loss=counted, gradient=differentiated, passes=9)
    assert found.passes == pytest.approx(sum(shares))
    assert found.gradients == len(slopes)
    assert found.tested == shares.count(1) - 1
    assert 9 <= found.passes < 9 + 4 + 1  # a race that has begun is run to its end
    assert len(set(shares)) == 3


def test_one_half_races_and_the_other_decides():
    """Where the proposing half misleads, no swap that the deciding half refuses is taken."""
    loss, gradient = quadratic(5, 12)
    start, shares = torch.tensor([1.0] * 6 + [0.0] * 6), set()

    def misleading(mask, share):
        shares.add(share)
        return -loss(mask)

    found = refine_by_swaps(
        start, gradient=gradient, loss=misleading, losses=lambda mask: torch.full((4,), loss(mask)), passes=100
    )
    assert list(found.losses) == sorted(found.losses, reverse=True)
    assert shares == {1 / 8, 1 / 4}


def test_the_best_mask_stays():
    loss, gradient = quadratic(2, 6)
    best = min(masks(6, 3), key=loss)
    found = refine(best, loss=loss, gradient=gradient, passes=100)
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
    found = refine(start, loss=loss, gradient=gradient, limits=Limits(within=groups), passes=100)
    assert found.mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    found = refine(start, loss=loss, gradient=gradient, limits=Limits(layer_index=groups, minimum_per_layer=1), passes=100)
    assert found.mask.tolist() == [0, 0, 0, 1, 0, 0, 1, 1]


def test_the_shortest_search_tries_a_swap():
    """One pass for the mask, at most four for the race, and one for the winner."""
    weights = torch.arange(20, dtype=torch.float64)
    start = torch.tensor([1.0] * 10 + [0.0] * 10)
    found = refine(
        start, loss=lambda mask, share: float(-(weights * mask).sum()), gradient=lambda mask: -weights, passes=MIN_SWAP_PASSES
    )
    assert len(found.swaps) == 1
    assert found.passes == MIN_SWAP_PASSES


def test_a_swap_that_changes_nothing_is_not_taken():
    start = torch.tensor([1.0, 0.0, 1.0, 0.0])
    slope = torch.tensor([0.0, -1.0, 0.0, -1.0])
    found = refine(start, loss=lambda mask, share: 1.0, gradient=lambda mask: slope)
    assert found.swaps == ()
    assert found.losses == (1.0,)
    assert torch.equal(found.mask, start)


def test_only_swaps_that_lower_the_loss_to_first_order_are_tried():
    tried = []

    def loss(mask, share):
        tried.append(mask.tolist())
        return float(len(tried))

    start = torch.tensor([1.0, 1.0, 0.0, 0.0])
    found = refine(start, loss=loss, gradient=lambda mask: torch.tensor([-1.0, -0.5, -1.0, -0.75]))
    assert found.passes == 1 + len(tried[1:]) == 3
    assert sorted(tried[1:]) == [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    tried.clear()
    assert refine(start, loss=loss, gradient=lambda mask: torch.zeros(4)).passes == 1


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

    refine(start, loss=loss, gradient=lambda mask: slope)
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
    found = refine(start, loss=lambda mask, share: 1.0, gradient=torch.zeros_like)
    assert not found.mask.requires_grad
    assert found.mask.data_ptr() != start.data_ptr()


def test_layers_alone_are_no_limit_and_a_minimum_needs_them():
    mask, layers = torch.tensor([1.0, 0, 1, 0]), torch.tensor([0, 0, 1, 1])
    assert torch.equal(Limits(layer_index=layers).allow(mask), Limits().allow(mask))
    assert int(Limits(layer_index=layers, minimum_per_layer=1).allow(mask).sum()) == 2
    with pytest.raises(GateError, match="a minimum of 1 heads per layer needs the layer of each gate"):
        Limits(minimum_per_layer=1)


class Noisy:
    """A quadratic true loss and two halves of examples that differ in what they lose with each head.

    Args:
        seed: of the world.
        noise: how much examples differ.
    """

    size, keep, examples = 24, 6, 256

    def __init__(self, seed: int, noise: float):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        factor = normal(self.size, self.size) / self.size
        self.matrix = factor @ factor.T
        self.lost = [noise * normal(self.examples, self.size) / math.sqrt(self.size) for _ in range(2)]
        self.bent = [noise * normal(self.examples, self.size) / math.sqrt(self.size) for _ in range(2)]
        self.start = torch.zeros(self.size)
        self.start[torch.randperm(self.size, generator=generator)[: self.keep]] = 1

    def true(self, mask):
        missing = 1 - mask.double()
        return float(missing @ self.matrix @ missing)

    def losses(self, half, mask):
        missing = 1 - mask.double()
        return self.true(mask) + self.lost[half] @ missing + (self.bent[half] @ missing).tanh()

    def gradient(self, mask):
        missing = 1 - mask.double()
        slopes = (1 - (self.bent[0] @ missing).tanh() ** 2).unsqueeze(1) * self.bent[0]
        return -(2 * self.matrix @ missing + self.lost[0].mean(0) + slopes.mean(0))

    def refined(self, start, *, tested):
        """A search whose deciding half tests swaps, or takes any gain of its mean as if all its examples had it."""

        def losses(mask):
            found = self.losses(1, mask)
            return found if tested else found.mean().expand(4)

        return refine_by_swaps(
            start,
            gradient=self.gradient,
            loss=lambda mask, share: float(self.losses(0, mask)[:: round(1 / share)].mean()),
            losses=losses,
        )

    def optimum(self):
        """A mask that no swap improves."""
        mask, found = self.start, True
        while found:
            swaps = [self._swapped(mask, *pair) for pair in product((mask == 0).nonzero(), mask.nonzero())]
            best = min(swaps, key=self.true)
            found = self.true(best) < self.true(mask) - 1e-12
            mask = best if found else mask
        return mask

    def _swapped(self, mask, added, dropped):
        swapped = mask.clone()
        swapped[added], swapped[dropped] = 1.0, 0.0
        return swapped


def test_noise_seldom_makes_a_good_mask_worse():
    """Masks that no swap improves: a search that takes any gain makes many worse, a tested one at most its level."""
    worse = {True: 0, False: 0}
    for seed in range(40):
        world = Noisy(seed, noise=1.0)
        best = world.optimum()
        for tested in worse:
            worse[tested] += world.true(world.refined(best, tested=tested).mask) > world.true(best) + 1e-12
    assert worse[False] >= 10
    assert worse[True] <= 2


def test_the_power_to_mend_a_bad_mask_stays():
    """From random masks, nearly all of what a search that takes any gain wins is won, with no more passes."""
    won, passes = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    for seed in range(20):
        world = Noisy(seed, noise=0.3)
        for tested in won:
            found = world.refined(world.start, tested=tested)
            won[tested] += world.true(world.start) - world.true(found.mask)
            passes[tested] += found.passes
    assert won[True] > 0.9 * won[False]
    assert passes[True] < passes[False]


def test_every_swap_was_tested_against_its_standard_error():
    world = Noisy(3, noise=1.0)
    found = world.refined(world.start, tested=True)
    mask = world.start.clone()
    assert found.swaps
    for (added, dropped), gain, mean in zip(found.swaps, found.gains, found.losses[1:], strict=True):
        assert (mask[added], mask[dropped]) == (0, 1)
        before, mask = world.losses(1, mask), world._swapped(mask, added, dropped)
        difference = before - world.losses(1, mask)
        assert mean == pytest.approx(float(world.losses(1, mask).mean()))
        assert gain.mean == pytest.approx(float(difference.mean()))
        assert gain.standard_error == pytest.approx(float(difference.std()) / math.sqrt(world.examples))
        assert gain.needed == pytest.approx(NormalDist().inv_cdf(1 - 0.05 / 4))  # four come out of a race
        assert gain.mean > gain.needed * gain.standard_error
    assert torch.equal(mask, found.mask)


def test_a_single_example_proves_nothing():
    gain = paired_gain(torch.tensor([5.0]), torch.tensor([1.0]), needed=2.0)
    assert gain.mean == 4
    assert not gain.is_taken


@pytest.mark.parametrize("seed", range(3))
def test_swaps_that_are_allowed_are_those_after_which_the_model_is_within_its_time(seed):
    table = drawn_table(seed)
    limit = TimeLimit((table.least + table.dense) / 2, table)
    mask = mask_within(torch.rand(8, generator=torch.Generator().manual_seed(seed)), limit)
    allowed = Limits(time=limit).allow(mask)
    for added in range(8):
        for dropped in range(8):
            after = mask.clone()
            after[added], after[dropped] = 1.0, 0.0
            is_swap = mask[added] == 0 and mask[dropped] == 1
            assert bool(allowed[added, dropped]) == (is_swap and limit.allows(counts_by_site(after, limit)))
