"""What becomes of rows of gradients: sums, standard errors, norms by layer, and the order of a removal in steps."""

from itertools import product

import pytest
import torch

from gates.errors import GateError
from gates.scores.importance import HeadImportance, normalise_by_layer, removal_ranking


def importance_of(rows, parts=1):
    metric = HeadImportance(rows.shape[1])
    for part in rows.chunk(parts):
        metric.update(part)
    return metric.compute()


def test_one_example_has_no_spread():
    found = importance_of(torch.tensor([[-2.0, 0.5]]))
    assert found.his.tolist() == [2.0, 0.5]
    assert found.signed.tolist() == [-2.0, 0.5]
    assert found.fisher.tolist() == [4.0, 0.25]
    assert found.standard_error.tolist() == [0.0, 0.0]


def test_two_examples_have_the_unbiased_standard_error():
    found = importance_of(torch.tensor([[1.0, 4.0], [-3.0, 4.0]]))
    assert found.standard_error.tolist() == pytest.approx([1.0, 0.0])


def test_examples_that_are_all_alike_have_no_spread_whatever_the_rounding():
    for value, parts in product((0.001, 0.1, 1 / 3, 0.7, 2.3, 123.456), (1, 7)):
        error = importance_of(torch.full((1000, 1), value).expand(-1, 3), parts).standard_error
        assert bool((error >= 0).all())
        assert bool((error < 1e-6 * value).all())


def test_float32_rows_are_summed_in_double_precision():
    rows = torch.randn(2000, 3, generator=torch.Generator().manual_seed(0)) + 300
    found = importance_of(rows, parts=9)
    torch.testing.assert_close(found.his, rows.double().abs().mean(0), rtol=1e-13, atol=0)
    torch.testing.assert_close(found.standard_error, rows.double().abs().std(0) / 2000**0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_norms_of_layers_that_come_in_any_order(dtype):
    scores, layers = torch.tensor([3.0, 5.0, 4.0, 12.0, 0.0], dtype=dtype), torch.tensor([3, 0, 3, 0, 2])
    found = normalise_by_layer(scores, layers)
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.tensor([0.6, 5 / 13, 0.8, 12 / 13, 0.0], dtype=dtype))


def test_gates_that_are_gone_no_longer_count():
    """Closed gates get the lowest scores here, and none is removed twice for it."""
    order = torch.tensor([4.0, 2, 5, 1, 3])
    ranking = removal_ranking(lambda mask: torch.where(mask == 1, order, -100.0), 5, share=0.2)
    assert ranking.tolist() == [3, 1, 4, 0, 2]


@pytest.mark.parametrize(
    ("gates", "share", "open_gates"),
    [(100, 0.29, [100, 71, 42, 13]), (10, 0.19, [*range(10, 0, -1)]), (7, 0.5, [7, 4, 1]), (4, 1.0, [4]), (3, 1e-6, [3, 2, 1])],
)
def test_the_size_of_a_step_is_the_share_rounded_down_and_at_least_one(gates, share, open_gates):
    masks = []
    removal_ranking(lambda mask: masks.append(int(mask.sum())) or torch.arange(gates), gates, share=share)
    assert masks == open_gates


def test_of_equal_gates_the_earlier_goes_first():
    assert removal_ranking(torch.zeros_like, 200, share=0.5).tolist() == list(range(200))
    assert removal_ranking(lambda mask: torch.arange(200) // 100, 200, share=1.0).tolist() == list(range(200))


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_impossible_shares_are_named(share):
    with pytest.raises(GateError, match=f"in one step is {share}"):
        removal_ranking(lambda mask: mask, 4, share=share)


def test_small_norms_are_norms_too():
    found = normalise_by_layer(torch.tensor([0.03, 0.04, 3e-20]), torch.tensor([0, 0, 1]))
    torch.testing.assert_close(found[:2], torch.tensor([0.6, 0.8]))
