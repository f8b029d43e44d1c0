import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gates.errors import GateError
from gates.scores.ranking import RANKINGS, hies, jaccard, ranking_scores, ranks

LAYERS = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)


def scores(name, **more):
    generator = torch.Generator().manual_seed(0)
    his, entropy = torch.rand(12, generator=generator), torch.rand(12, generator=generator)
    return ranking_scores(name, his=his, entropy=entropy, layer_index=LAYERS, **more)


def test_opposite_rankings_are_opposite():
    assert torch.equal(scores("his"), -scores("his-inverted"))
    assert torch.equal(scores("entropy-low-first"), -scores("entropy-high-first"))


def test_entropy_low_first_gives_up_the_lowest():
    entropy = torch.arange(12.0)
    ranking = ranking_scores("entropy-low-first", his=torch.ones(12), entropy=entropy, layer_index=LAYERS)
    assert ranking.argsort().tolist() == list(range(12))


def test_hies_ends_are_his_and_entropy():
    his, entropy = torch.rand(12), torch.rand(12)
    assert torch.equal(hies(his, entropy, 1.0).argsort(), his.argsort())
    assert torch.equal(hies(his, entropy, 0.0).argsort(), (-entropy).argsort())
    with pytest.raises(GateError, match=r"1\.5"):
        hies(his, entropy, 1.5)


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=20))
@settings(deadline=None)
def test_ranks_are_mean_ranks(values):
    assert ranks(torch.tensor(values)).tolist() == (stats.rankdata(values) - 1).tolist()


def test_random_is_a_function_of_the_seed():
    assert torch.equal(scores("random", seed=3), scores("random", seed=3))
    assert not torch.equal(scores("random", seed=3), scores("random", seed=4))


def test_unknown_ranking_is_named():
    with pytest.raises(GateError, match="'best'"):
        scores("best")


@pytest.mark.parametrize("name", RANKINGS)
def test_every_ranking_scores_every_head(name):
    assert scores(name).shape == (12,)
    assert scores(name).isfinite().all()


def test_agreement():
    a, b = torch.tensor([1.0, 1, 0, 0]), torch.tensor([1.0, 0, 1, 0])
    assert jaccard(a, b) == pytest.approx(1 / 3)
    assert jaccard(torch.zeros(4), torch.zeros(4)) == 1.0
