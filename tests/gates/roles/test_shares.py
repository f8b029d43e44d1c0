"""The bootstrap over sentences against the formula of a ratio's standard error, and the best baseline."""

import torch
from transformers import BertConfig, BertModel

from gates import find_attention
from gates.roles.shares import REPLICATES, Counts, SentenceShares, sentence_weights


def make_sites():
    return find_attention(BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2)))


def filled(hits, chances, baselines):
    """One site's numbers for both sites, ``[sentences, heads, columns]``."""
    metric = SentenceShares(make_sites(), columns=hits.shape[-1], baselines=baselines.shape[1])
    for site in range(2):
        metric.update(site, Counts(hits, chances, baselines), sentence_weights(torch.arange(len(hits))))
    return metric.compute()


def test_weights_depend_on_the_number_of_the_sentence_alone():
    weights = sentence_weights(torch.tensor([3, 5, 3]))
    assert weights.shape == (3, 1 + REPLICATES)
    assert (weights[:, 0] == 1).all()
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    many = sentence_weights(torch.arange(300))[:, 1:]
    assert abs(many.mean() - 1) < 0.02
    assert abs(many.var() - 1) < 0.04  # that of Poisson(1)


def test_the_error_is_that_of_a_ratio_of_sums_over_sentences():
    generator = torch.Generator().manual_seed(0)
    chances = torch.randint(1, 20, (400, 1), generator=generator)
    p = torch.rand(400, 2, 1, generator=generator)  # sentences differ, so tokens are not independent
    hits = torch.binomial(chances.unsqueeze(1).expand(-1, 2, -1).float(), p, generator=generator)
    found = filled(hits, chances, torch.zeros(400, 1, 1))
    share = hits.sum(0) / chances.sum(0)
    linear = ((hits - share * chances.unsqueeze(1)) ** 2).sum(0).sqrt() / chances.sum(0)
    torch.testing.assert_close(found.value[:2], share.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.error[:2], linear.double(), rtol=0.15, atol=0)


def test_the_best_baseline_is_found_for_each_column_and_its_difference_is_paired():
    hits = torch.randint(0, 5, (100, 2, 2), generator=torch.Generator().manual_seed(1)).double()
    baselines = torch.stack([0.5 * hits[:, 0], hits[:, 0]], dim=1)  # the second does what the first head does
    baselines[:, 0, 1] += 4
    found = filled(hits, torch.full((100, 2), 10), baselines)
    assert found.which[0].tolist() == [1, 0]
    assert found.baseline[0, 0] == found.value[0, 0]
    assert found.difference_error[0, 0] == 0
    assert found.difference_error[1, 0] > found.error[1, 0]


def test_without_an_opportunity_there_is_no_share():
    found = filled(torch.zeros(5, 2, 1), torch.zeros(5, 1), torch.zeros(5, 1, 1))
    assert found.value.isnan().all()
    assert found.error.isnan().all()
    assert (found.count == 0).all()
