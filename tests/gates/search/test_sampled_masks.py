"""Draws around a ranking: they keep to the budget, follow the distribution they name, and never do harm."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.errors import GateError
from gates.gating.budget import Budget, budget_mask
from gates.gating.hard_concrete import LOG_ALPHA_LIMIT
from gates.search.sampled_masks import best_draw, draw_masks, spread_ranks

KINDS, LAYERS = torch.tensor([0] * 8 + [1] * 8), torch.arange(16) // 4


def draws(scores, budget, **options):
    settings = {"kind_index": KINDS, "layer_index": LAYERS, "count": 12, "temperature": 1.0, "seed": 0}
    return draw_masks(scores, budget, **(settings | options))


@given(st.integers(0, 8), st.integers(0, 8), st.booleans(), st.floats(0.01, 10), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_every_draw_keeps_to_the_budget_and_the_minimum(first, second, per_kind, temperature, seed):
    scores = torch.randn(16, generator=torch.Generator().manual_seed(seed)) * 3
    budget = Budget(first + second, {"encoder": first, "decoder": second} if per_kind else {})
    minimum = 1 if (min(first, second) >= 2 if per_kind else first + second >= 4) else 0
    found = draws(scores, budget, temperature=temperature, seed=seed, minimum_per_layer=minimum)
    assert 1 <= len(found) <= 12
    assert len({tuple(mask.tolist()) for mask in found}) == len(found)
    for mask in found:
        assert set(mask.tolist()) <= {0.0, 1.0}
        assert int(mask.sum()) == first + second
        assert all(int(part.sum()) >= minimum for part in mask.split(4))
        if per_kind:
            assert [int(part.sum()) for part in mask.split(8)] == [first, second]


def test_the_seed_decides():
    scores, budget = torch.zeros(16), Budget(5, {})
    first, again, other = (draws(scores, budget, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(mask, same) for mask, same in zip(first, again, strict=True))
    assert not all(torch.equal(mask, same) for mask, same in zip(first, other, strict=False))


def test_in_the_cold_only_the_rankings_own_mask_is_drawn():
    scores, budget = torch.randn(16, generator=torch.Generator().manual_seed(3)), Budget(5, {})
    (only,) = draws(scores, budget, temperature=1e-6)
    assert torch.equal(only, budget_mask(scores, budget, kind_index=KINDS, layer_index=LAYERS))
    assert len(draws(scores, budget, temperature=100.0)) == 12
    with pytest.raises(GateError, match="temperature of draws is 0; expected a number above 0"):
        draws(scores, budget, temperature=0)


def test_they_are_drawn_without_replacement_from_the_softmax():
    """Two of three: the chance of each pair from the two orders in which it can come (Plackett and Luce)."""
    scores, temperature, trials = torch.tensor([1.0, 0.0, -1.0]), 2.0, 4000
    p = (scores / temperature).softmax(0).tolist()
    counts = dict.fromkeys(combinations(range(3), 2), 0)
    places = {"kind_index": torch.zeros(3), "layer_index": torch.zeros(3)}
    for seed in range(trials):
        (mask,) = draw_masks(scores, Budget(2, {}), count=1, temperature=temperature, seed=seed, **places)
        counts[tuple(mask.nonzero().flatten().tolist())] += 1
    for (a, b), count in counts.items():
        chance = p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b])
        assert count / trials == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / trials))


def test_ranks_are_spread_over_the_range_of_log_alpha():
    found = spread_ranks(torch.tensor([5.0, -1e6, 5.0, 1e9, 0.0]))
    half = LOG_ALPHA_LIMIT / 2
    torch.testing.assert_close(found, torch.tensor([half / 2, -2 * half, half / 2, 2 * half, -half], dtype=torch.float64))
    assert spread_ranks(torch.tensor([7.0, 3.0])).tolist() == [LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT]
    assert torch.equal(spread_ranks(torch.tensor([3.0])), torch.tensor([-LOG_ALPHA_LIMIT], dtype=torch.float64))


def weighted(weights):
    return lambda mask, share: -float((weights * mask).sum())


@given(st.integers(0, 10**6), st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_the_best_of_all_draws_and_the_start_is_taken(seed, count):
    """Where every part of the data says the same."""
    weights = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    start, *others = draws(torch.zeros(16), Budget(6, {}), count=count, seed=seed)
    loss = weighted(weights)
    found = best_draw(start, others, loss=loss)
    assert found.losses == (loss(start, 1), min(loss(mask, 1) for mask in [start, *others]))
    assert loss(found.mask, 1) == found.losses[1]


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_it_is_never_worse_than_the_start_on_all_data_even_where_parts_mislead(seed):
    weights = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    start, *others = draws(torch.zeros(16), Budget(6, {}), count=30, seed=seed)
    found = best_draw(start, others, loss=lambda mask, share: weighted(weights if share == 1 else -weights)(mask, share))
    assert found.losses[1] <= found.losses[0] == weighted(weights)(start, 1)


def test_the_start_stays_among_equals_and_passes_are_counted():
    start, *others = draws(torch.zeros(16), Budget(6, {}), count=33)
    shares = []

    def level(mask, share):
        shares.append(share)
        return 1.0

    found = best_draw(start, [start, *others], loss=level)
    assert torch.equal(found.mask, start)
    assert found.passes == pytest.approx(sum(shares))
    assert sum(shares) == pytest.approx(1 + len(others) / 8 + 8 / 4 + 4)


def test_scores_of_half_precision_are_divided_without_overflow():
    scores, budget = torch.linspace(-4, 4, 16)[torch.randperm(16)].half(), Budget(5, {})
    (only,) = draws(scores, budget, temperature=1e-6)
    assert torch.equal(only, budget_mask(scores, budget, kind_index=KINDS, layer_index=LAYERS))


def test_the_best_mask_shares_nothing_with_the_one_to_start_from():
    start = torch.ones(4, requires_grad=True)
    found = best_draw(start, [], loss=lambda mask, share: 1.0)
    assert not found.mask.requires_grad
    assert found.mask.data_ptr() != start.data_ptr()
