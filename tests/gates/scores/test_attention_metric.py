"""Means over the queries that count, by hand."""

from types import SimpleNamespace

import pytest
import torch

from gates.scores.attention import AttentionConfidence, AttentionEntropy

SITES = (SimpleNamespace(heads=2), SimpleNamespace(heads=3))
VALUES = torch.arange(1.0, 17).view(2, 2, 4)
"""Of two examples, two heads and four queries."""


def test_the_mean_is_over_queries_that_are_not_padding():
    metric = AttentionConfidence(SITES)
    valid = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1]])
    metric.update(0, VALUES, torch.full((1, 1, 4), 5), valid)
    expected = [(1 + 2 + 10 + 11 + 12) / 5, (5 + 6 + 14 + 15 + 16) / 5]
    assert metric.compute().tolist() == pytest.approx([*expected, 0, 0, 0])
    assert metric.compute().dtype == torch.float64


def test_every_site_has_a_mean_of_its_own_over_all_its_passes():
    metric = AttentionConfidence(SITES)
    metric.update(0, VALUES, torch.ones(1, 1, 4))
    metric.update(1, torch.full((1, 3, 2), 0.25), torch.ones(1, 1, 2))
    metric.update(1, torch.full((1, 3, 6), 0.75), torch.ones(1, 1, 6))
    assert metric.compute().tolist() == pytest.approx([6.5, 10.5, 0.625, 0.625, 0.625])


def test_entropy_counts_queries_of_two_keys_on_and_confidence_all():
    values, visible = torch.tensor([[[0.5, 0.25, 0.125, 1.0]]]).expand(1, 2, 4), torch.tensor([[[2, 1, 0, 4]]])
    confidence, entropy = AttentionConfidence(SITES[:1]), AttentionEntropy(SITES[:1])
    for metric in (confidence, entropy):
        metric.update(0, values, visible)
    assert confidence.compute().tolist() == pytest.approx([1.875 / 4] * 2)
    log = torch.tensor([2.0, 4.0]).log()
    assert entropy.compute().tolist() == pytest.approx([float((torch.tensor([0.5, 1.0]) / log).mean())] * 2)


def test_a_site_without_queries_that_count_has_no_entropy():
    metric = AttentionEntropy(SITES)
    metric.update(0, VALUES, torch.ones(1, 1, 4))
    assert metric.compute().tolist() == [0.0] * 5


def test_examples_may_see_different_numbers_of_keys():
    metric = AttentionEntropy(SITES)
    values = torch.tensor([0.2, 0.4, 0.6, 0.8]).view(4, 1, 1).expand(4, 2, 3)
    visible = torch.tensor([[[2, 2, 2]], [[1, 1, 2]], [[1, 1, 1]], [[2, 0, 4]]])
    metric.update(0, values, visible)
    logs = torch.tensor([2.0, 2, 2, 2, 2, 4]).log()
    expected = float((torch.tensor([0.2, 0.2, 0.2, 0.4, 0.8, 0.8]) / logs).mean())
    assert metric.compute()[:2].tolist() == pytest.approx([expected] * 2)


def test_a_single_query_is_its_own_mean_and_many_are_summed_in_double_precision():
    metric = AttentionConfidence(SITES)
    metric.update(0, torch.full((1, 2, 1), 0.75), torch.ones(1, 1, 1))
    values = torch.rand(2, 3, 20_000, generator=torch.Generator().manual_seed(0)) + 100
    metric.update(1, values, torch.ones(1, 1, 20_000))
    assert metric.compute()[:2].tolist() == [0.75, 0.75]
    torch.testing.assert_close(metric.compute()[2:], values.double().mean((0, 2)), rtol=1e-13, atol=0)
    assert not metric.count.is_floating_point()  # a float would stop at 2^24 queries
