import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from gates.budget import Budget, budget_mask
from gates.errors import GateError
from gates.scores.ranking import RANKINGS, hies, jaccard, keep_scores, ranks
from gates.sites import KINDS

LAYERS = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)
KINDS_ = torch.zeros(12, dtype=torch.long)


def scores(name, **more):
    generator = torch.Generator().manual_seed(0)
    his, entropy = torch.rand(12, generator=generator), torch.rand(12, generator=generator)
    return keep_scores(name, his=his, entropy=entropy, layer_index=LAYERS, **more)


def test_opposite_rankings_are_opposite():
    assert torch.equal(scores("his"), -scores("his-inverted"))
    assert torch.equal(scores("entropy-low-first"), -scores("entropy-high-first"))


def test_entropy_low_first_gives_up_the_lowest():
    entropy = torch.arange(12.0)
    keep = keep_scores("entropy-low-first", his=torch.ones(12), entropy=entropy, layer_index=LAYERS)
    assert budget_mask(keep, Budget(3, {}), kind_index=KINDS_, layer_index=LAYERS).nonzero().flatten().tolist() == [9, 10, 11]


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
@pytest.mark.parametrize("budget", [0, 1, 5, 12])
def test_masks_hold_the_budget(name, budget):
    mask = budget_mask(scores(name), Budget(budget, {}), kind_index=KINDS_, layer_index=LAYERS)
    assert mask.sum() == budget


def test_a_minimum_per_layer_is_kept():
    keep = torch.tensor([9.0] * 4 + [5.0] * 4 + [0.0, 0.1, 0.2, 0.3])
    mask = budget_mask(keep, Budget(5, {}), kind_index=KINDS_, layer_index=LAYERS, minimum_per_layer=1)
    assert [int(part.sum()) for part in mask.split(4)] == [3, 1, 1]
    assert mask[11] == 1
    with pytest.raises(GateError, match="needs 6 heads"):
        budget_mask(keep, Budget(5, {}), kind_index=KINDS_, layer_index=LAYERS, minimum_per_layer=2)


def test_a_minimum_per_layer_that_does_not_fit_into_the_budget_of_a_kind_names_it():
    kinds, layers = torch.tensor([0] * 4 + [1] * 4), torch.arange(4).repeat_interleave(2)
    budget = Budget.parse({KINDS[0]: 1}, {KINDS[0]: 4, KINDS[1]: 4})
    with pytest.raises(GateError, match=f"needs 2 {KINDS[0]} heads, more than the {KINDS[0]} budget of 1;"):
        budget_mask(torch.arange(8.0), budget, kind_index=kinds, layer_index=layers, minimum_per_layer=1)


def test_agreement():
    a, b = torch.tensor([1.0, 1, 0, 0]), torch.tensor([1.0, 0, 1, 0])
    assert jaccard(a, b) == pytest.approx(1 / 3)
    assert jaccard(torch.zeros(4), torch.zeros(4)) == 1.0
