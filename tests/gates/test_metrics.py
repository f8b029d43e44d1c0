"""What holds for every Metric of the library: two processes that see a part of the data each come to what one finds in all."""

import pickle
from types import SimpleNamespace

import pytest
import torch

from gates.recovery.least_squares import ProjectionMoments
from gates.relevance.heads import RelevanceShares
from gates.scores.ablation import MeanHeadOutput
from gates.scores.attention import AttentionConfidence, AttentionEntropy
from gates.scores.brain_surgeon import SiteMoments
from gates.scores.fisher import FisherInformation
from gates.scores.importance import HeadImportance
from gates.scores.weights import MeanGradients

SITES = (SimpleNamespace(heads=2, head_dim=4), SimpleNamespace(heads=3, head_dim=4))
VISIBLE = torch.full((1, 1, 6), 5)


def tensor(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def of_attention(seed):
    return [(0, tensor(seed, 3, 2, 6), VISIBLE), (1, tensor(seed, 2, 3, 6), VISIBLE)]


METRICS = {
    "importance": (lambda **more: HeadImportance(4, **more), lambda seed: [(tensor(seed, 3 + seed, 4) - 0.5,)]),
    "relevance": (
        lambda **more: RelevanceShares(torch.tensor([0, 0, 1, 1]), **more),
        lambda seed: [(tensor(seed, 3 + seed, 4) - 0.5,)],
    ),
    "fisher": (lambda **more: FisherInformation(4, **more), lambda seed: [(tensor(seed, 3 + seed, 4) - 0.5,)]),
    "brain surgeon": (
        lambda **more: SiteMoments(6, 4, **more),
        lambda seed: [
            (tensor(seed, 2 + seed, 5, 6), tensor(seed + 7, 2 + seed, 5, 4), 2 + seed, tensor(seed, 2 + seed, 5) > 0.3)
        ],
    ),
    "gradients": (
        lambda **more: MeanGradients([torch.zeros(2), torch.zeros(3, 2)], **more),
        lambda seed: [([tensor(seed, 2), tensor(seed, 3, 2)], 2 + seed)],
    ),
    "entropy": (lambda **more: AttentionEntropy(SITES, **more), of_attention),
    "confidence": (lambda **more: AttentionConfidence(SITES, **more), of_attention),
    "means": (
        lambda **more: MeanHeadOutput(SITES, **more),
        lambda seed: [(0, tensor(seed, 2, 6, 8)), (1, tensor(seed, 3, 6, 12))],
    ),
    "moments": (lambda **more: ProjectionMoments(4, 3, **more), lambda seed: [(tensor(seed, 12, 4), tensor(seed + 10, 12, 3))]),
}


def flat(result):
    """All numbers of a result, which is a tensor or holds tensors."""
    return torch.cat([part.double().flatten() for part in ([result] if isinstance(result, torch.Tensor) else result)])


def fed(name, *seeds):
    build, batches = METRICS[name]
    metric = build()
    for seed in seeds:
        for batch in batches(seed):
            metric.update(*batch)
    return metric


@pytest.mark.parametrize("name", METRICS)
def test_parts_come_together_to_the_whole(name):
    whole, first = fed(name, 1, 2, 3), fed(name, 1, 3)
    first.merge_state(fed(name, 2))
    torch.testing.assert_close(flat(first.compute()), flat(whole.compute()))
    assert not torch.allclose(flat(whole.compute()), flat(fed(name, 1, 3).compute()))


ONE = (SimpleNamespace(heads=1, head_dim=1),)
OF_ONE_HEAD = {
    "importance": (HeadImportance(1), (torch.ones(3, 1),), [(1,)] * 4),
    "relevance": (RelevanceShares(torch.tensor([0])), (torch.ones(3, 1),), [(1,)] * 2),
    "fisher": (FisherInformation(1), (torch.ones(3, 1),), [(1, 1)]),
    "gradients": (MeanGradients([torch.zeros(1)]), ([torch.ones(1)], 2), [(1,)]),
    "entropy": (AttentionEntropy(ONE), (0, torch.ones(3, 1, 6), VISIBLE), [(1,)]),
    "confidence": (AttentionConfidence(ONE), (0, torch.ones(3, 1, 6), VISIBLE), [(1,)]),
    "means": (MeanHeadOutput(ONE), (0, torch.ones(2, 6, 1)), [(1,)]),
    "moments": (ProjectionMoments(1, 1), (torch.ones(6, 1), torch.ones(6, 1)), [(), (1,), (1,), (1, 1), (1, 1), ()]),
}


@pytest.mark.parametrize("name", OF_ONE_HEAD)
def test_the_result_of_one_head_has_the_shape_of_that_of_many(name):
    metric, batch, shapes = OF_ONE_HEAD[name]
    metric.update(*batch)
    for read in (metric, metric, pickle.loads(pickle.dumps(metric))):  # computed, kept, and computed by a copy
        result = read.compute()
        assert [tuple(part.shape) for part in ([result] if isinstance(result, torch.Tensor) else result)] == shapes
    before = flat(metric.compute()).clone()
    kept = metric.compute()
    for state in metric.metric_state.values():
        state.zero_()
    assert torch.equal(flat(kept), before)
