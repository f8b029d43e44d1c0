import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores import fisher as module
from gates.scores.fisher import FisherInformation, gram_and_cross, rearrange, removal_cost, rescale
from gates.scores.importance import head_gradients
from tests.gates.scores.test_importance import losses_of
from tests.models import build, inputs

LAYERS = torch.tensor([0] * 5 + [1] * 5)


def random_fisher(seed, gates=10, samples=8):
    rows = torch.randn(samples, gates, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ rows / samples


def search(fisher, kept, layers=LAYERS):
    """The mask of the search alone: the highest of the diagonal."""
    mask = torch.zeros(len(layers))
    mask[fisher.diagonal().argsort(descending=True)[:kept]] = 1.0
    return mask


def brute_force(mask, fisher):
    """The least cost of any mask with as many gates in each layer, entry by entry."""
    total = 0.0
    for layer in (0, 1):
        members = [i for i in range(10) if LAYERS[i] == layer]
        count = sum(int(mask[i] == 0) for i in members)
        total += min(sum(float(fisher[i, j]) for i in c for j in c) / 2 for c in combinations(members, count))
    return total


@given(st.integers(0, 10**6), st.integers(0, 10), st.booleans())
@settings(deadline=None, max_examples=60)
def test_rearranging_never_costs_more_and_finds_the_best(seed, kept, exhaustive):
    fisher = random_fisher(seed)
    mask = search(fisher, kept)
    with pytest.MonkeyPatch.context() as patch:
        if not exhaustive:
            patch.setattr(module, "ALL_SUBSETS", 0)
        found = rearrange(mask, fisher, LAYERS)
    assert [int(part.sum()) for part in found.split(5)] == [int(part.sum()) for part in mask.split(5)]
    cost = float(removal_cost(found, fisher, LAYERS))
    assert cost <= float(removal_cost(mask, fisher, LAYERS)) + 1e-12
    best = brute_force(mask, fisher)
    if exhaustive:
        assert cost == pytest.approx(best, abs=1e-12)
    else:
        assert cost >= best - 1e-12
        for layer in (0, 1):  # no exchange within a layer helps any more
            members = (layer == LAYERS).nonzero().flatten().tolist()
            for i in members:
                for j in members:
                    other = found.clone()
                    other[i], other[j] = found[j], found[i]
                    assert float(removal_cost(other, fisher, LAYERS)) >= cost - 1e-9


def test_two_heads_that_cancel_go_together():
    fisher = torch.tensor([[4.0, -4, 0, 0], [-4, 4, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    mask, layers = torch.tensor([1.0, 1, 0, 0]), torch.zeros(4, dtype=torch.long)
    assert rearrange(mask, fisher, layers).tolist() == [0, 0, 1, 1]
    apart = torch.tensor([0, 1, 2, 3])
    assert rearrange(mask, fisher, apart).tolist() == mask.tolist()


def test_blocks_between_layers_are_left_out():
    fisher = torch.full((2, 2), 3.0)
    cost = removal_cost(torch.tensor([[0.0, 0], [1, 0]]), fisher, torch.tensor([0, 1]))
    assert cost.tolist() == [3.0, 1.5]


def test_the_metric_streams_to_the_mean_of_outer_products():
    model, batch = build("llama"), inputs("llama")
    gates = HeadGates(model).eval()
    rows = head_gradients(gates, lambda: losses_of(model, batch)).double()
    metric = FisherInformation(8)
    for part in rows.split(2):
        metric.update(part)
    torch.testing.assert_close(metric.compute(), sum(torch.outer(row, row) for row in rows) / 3)


def contributions(seed, gates=4, width=3, out=6, positions=50):
    """Heads, output weight, and what each head adds to the output ``[positions * out, gates]``."""
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(positions, gates * width, generator=generator, dtype=torch.float64)
    weight = torch.randn(out, gates * width, generator=generator, dtype=torch.float64)
    parts = [(heads[:, at : at + width] @ weight[:, at : at + width].T).flatten() for at in range(0, gates * width, width)]
    return heads, weight, torch.stack(parts, 1)


def test_inner_products_come_from_moments():
    heads, weight, parts = contributions(0)
    dense, _, of_dense = contributions(1)
    of_dense = (dense @ weight.T).flatten()
    gram, cross = gram_and_cross(heads.T @ heads, heads.T @ dense, weight, 4)
    torch.testing.assert_close(gram, parts.T @ parts)
    torch.testing.assert_close(cross, parts.T @ of_dense)


@given(st.integers(0, 10**6), st.integers(1, 15))
@settings(deadline=None, max_examples=40)
def test_rescaling_is_the_least_squares_solution(seed, kept):
    _, _, parts = contributions(seed)
    target = parts.sum(1)
    mask = torch.tensor([float(kept >> bit & 1) for bit in range(4)])
    values = rescale(mask, parts.T @ parts, parts.T @ target)
    chosen = mask.bool()
    reference = torch.linalg.lstsq(parts[:, chosen], target.unsqueeze(1)).solution.squeeze(1)
    torch.testing.assert_close(values[chosen], reference, atol=1e-4, rtol=1e-4)
    assert bool((values[~chosen] == 0).all())
    assert float((parts @ values - target).square().sum()) <= float((parts @ mask.double() - target).square().sum()) + 1e-9


def test_heads_that_do_nothing_or_go_wild_stay_as_they_are():
    mask = torch.tensor([1.0, 1, 0])
    assert rescale(mask, torch.zeros(3, 3), torch.zeros(3)).tolist() == [1, 1, 0]
    assert rescale(torch.zeros(3), torch.eye(3), torch.ones(3)).tolist() == [0, 0, 0]
    assert rescale(mask, torch.eye(3), torch.tensor([9.0, -9, 0])).tolist() == pytest.approx([9, -9, 0], abs=1e-4)
    assert rescale(mask, torch.eye(3), torch.tensor([11.0, 1, 0])).tolist() == [1, 1, 0]
    twins = torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 1]])
    values = rescale(mask, twins, torch.tensor([3.0, 3, 0]))
    assert values.tolist() == pytest.approx([1.5, 1.5, 0], abs=1e-4)


def test_sums_of_float32_rows_are_exact():
    rows = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)) + 100
    metric = FisherInformation(4)
    for part in rows.split(7):
        metric.update(part)
    torch.testing.assert_close(metric.compute(), rows.double().T @ rows.double() / 300, rtol=1e-13, atol=0)


@pytest.mark.parametrize("subsets", [0, 20_000])
def test_of_equal_masks_the_given_one_stays(monkeypatch, subsets):
    monkeypatch.setattr(module, "ALL_SUBSETS", subsets)
    mask = torch.tensor([0.0, 1, 0, 1, 1, 1, 0, 0, 1, 0])
    assert torch.equal(rearrange(mask, torch.eye(10), LAYERS), mask)
    assert torch.equal(rearrange(mask, torch.zeros(10, 10), LAYERS), mask)


def test_rearranging_gives_a_new_mask_of_the_same_kind():
    fisher = torch.diag(torch.arange(10.0))
    for mask in (torch.tensor([1.0, 0, 0, 0, 0] * 2), torch.tensor([True, False, False, False, False] * 2)):
        before = mask.clone()
        found = rearrange(mask, fisher, LAYERS)
        assert found.dtype == mask.dtype
        assert found.tolist() == [0, 0, 0, 0, 1] * 2
        assert torch.equal(mask, before)


def test_inner_products_of_float32_weights_are_in_double_precision():
    heads, weight, _ = contributions(0)
    weight = weight.float()
    found = gram_and_cross(heads.T @ heads, heads.T @ heads, weight, 4)
    expected = gram_and_cross(heads.T @ heads, heads.T @ heads, weight.double(), 4)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-9)


def test_moments_in_single_precision_are_fitted_in_double():
    _, _, parts = contributions(2)
    gram, cross, mask = (parts.T @ parts).float(), (parts.T @ parts.sum(1)).float(), torch.tensor([1.0, 0, 1, 1])
    expected = rescale(mask, gram.double(), cross.double())
    assert torch.equal(rescale(mask, gram, cross), expected)


def test_a_fit_is_trusted_up_to_ten_times_a_head_of_either_sign():
    mask = torch.tensor([1.0, 1, 0])
    for scale in (9.9, -9.9):
        assert rescale(mask, torch.eye(3), torch.tensor([scale, 1, 0])).tolist() == pytest.approx([scale, 1, 0], abs=1e-4)
    for scale in (10.1, -10.1):
        assert rescale(mask, torch.eye(3), torch.tensor([scale, 1, 0])).tolist() == [1, 1, 0]


def test_damping_draws_to_the_mask_in_proportion_to_the_heads():
    """With a damping as large as the mean square of the kept heads, half of a correction is made: at any scale, of any number
    of heads."""
    mask = torch.tensor([1.0, 0, 1, 1])
    for unit in (1e-6, 1.0, 1e6):
        found = rescale(mask, unit * torch.eye(4), unit * torch.tensor([3.0, 7, 1, -1]), damping=1.0)
        assert found.tolist() == pytest.approx([2.0, 0, 1, 0])


def test_rescaling_leaves_the_mask_alone():
    mask = torch.tensor([1.0, 0], dtype=torch.float64)
    assert rescale(mask, torch.eye(2), torch.tensor([3.0, 0])).tolist() == pytest.approx([3.0, 0], abs=1e-4)
    assert mask.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("subsets", [0, 20_000])
def test_small_differences_between_large_costs_count(monkeypatch, subsets):
    """Closing 0 and 1 costs 2^24 + 1, which float32 rounds to the 2^24 of closing 0 and 2."""
    monkeypatch.setattr(module, "ALL_SUBSETS", subsets)
    fisher = torch.tensor([[2.0**24, 0, 0], [0, 1, 2.0**25], [0, 2.0**25, 0]])
    assert rearrange(torch.tensor([0.0, 0, 1]), fisher, torch.zeros(3, dtype=torch.long)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["gram", "cross"])
def test_moments_that_are_not_finite_are_refused(of, value):
    moments = {"gram": torch.eye(3), "cross": torch.ones(3)}
    moments[of].view(-1)[0] = value
    with pytest.raises(GateError, match="not finite, so gates cannot be rescaled"):
        rescale(torch.ones(3), **moments)
