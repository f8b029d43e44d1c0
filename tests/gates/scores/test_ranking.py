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


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=20))
@settings(deadline=None)
def test_ranks_are_mean_ranks(values):
    assert ranks(torch.tensor(values)).tolist() == (stats.rankdata(values) - 1).tolist()


def test_random_is_a_function_of_the_seed():
    assert torch.equal(scores("random", seed=3), scores("random", seed=3))
    assert torch.equal(scores("random", seed=0), scores("random"))
    assert not torch.equal(scores("random", seed=3), scores("random", seed=4))


def test_unknown_ranking_is_named():
    with pytest.raises(GateError, match="'best'"):
        scores("best")


def test_rank_sum_prefers_high_importance_and_low_entropy():
    his, entropy = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.3]), torch.tensor([0.8, 0.1, 0.2, 0.6, 0.6])
    found = ranking_scores("rank-sum", his=his, entropy=entropy, layer_index=torch.zeros(5, dtype=torch.long))
    expected = stats.rankdata(his.numpy()) - stats.rankdata(entropy.numpy())
    assert (found - found.mean()).tolist() == pytest.approx((expected - expected.mean()).tolist())
    assert found.argmax() == 1
    assert found.argmin() == 0


def test_hies_is_the_published_formula():
    his, entropy = torch.rand(12, dtype=torch.float64) + 2, torch.rand(12, dtype=torch.float64) + 1
    scaled = [(x - min(x)) / (max(x) - min(x)) for x in (his.numpy(), entropy.numpy())]
    for alpha in (0.0, 0.3, 1.0):
        expected = alpha * scaled[0] + (1 - alpha) * (1 - scaled[1])
        assert hies(his, entropy, alpha).tolist() == pytest.approx(expected.tolist())
    for alpha in (-0.1, 1.5):
        with pytest.raises(GateError, match=f"alpha is {alpha}"):
            hies(his, entropy, alpha)


def test_in_hies_equal_scores_say_nothing():
    """Scores without a spread are no division by 0: the other score alone decides."""
    some, equal = torch.tensor([0.2, 0.9, 0.4]), torch.full((3,), 0.7)
    assert hies(some, equal, 0.5).argsort().tolist() == some.argsort().tolist()
    assert hies(equal, some, 0.5).argsort().tolist() == (-some).argsort().tolist()
    torch.testing.assert_close(hies(equal, some, 1.0), torch.zeros(3))


@pytest.mark.parametrize("name", RANKINGS)
def test_every_ranking_scores_every_head_in_double_precision(name):
    found = scores(name)
    assert found.shape == (12,)
    assert found.isfinite().all()
    assert found.dtype == (torch.float32 if name == "rank-sum" else torch.float64)


def test_agreement_is_a_plain_number():
    assert jaccard(torch.tensor([1.0, 1, 0, 0]), torch.tensor([1.0, 0, 1, 0])) == pytest.approx(1 / 3)
    assert jaccard(torch.zeros(4), torch.zeros(4)) == 1.0
    one, other = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 0, 0])
    for value, expected in ((jaccard(one, one), 1.0), (jaccard(one, other), 0.0), (jaccard(other, one), 0.0)):
        assert type(value) is float
        assert value == expected
