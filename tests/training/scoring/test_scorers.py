"""What methods make of raw scores, and what they are charged for them."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from scipy.stats import rankdata

from gates.errors import GateError
from gates.gating.budget import Budget
from gates.scores.fisher import removal_cost
from gates.scores.importance import normalise_by_layer
from tests.training.scoring.subjects import RAWS, ROWS, make_scores
from training.runs.cost import Cost
from training.scoring.passes import PASSES
from training.scoring.scorers import SCORERS, scorer


@pytest.mark.parametrize("method", SCORERS)
def test_every_method_holds_every_budget(scores, method):
    gates = scores.subject.gates
    for count in (0, 1, 3, gates.size):
        mask = scores.mask(method, Budget(count, {}), seed=1)
        assert mask.shape == (gates.size,)
        assert int(mask.sum()) == count
        assert set(mask.tolist()) <= {0.0, 1.0}
    layered = scores.mask(method, Budget(2, {}), minimum_per_layer=1)
    assert [int(part.sum()) for part in layered.split(gates.sizes)] == [1, 1]
    if SCORERS[method].ranks:
        keep = scores.ranking(method)
        assert keep.dtype == torch.float64
        assert bool(torch.isfinite(keep).all())


def test_rearranging_costs_no_more_than_the_search(scores):
    layers, matrix = scores.subject.gates.layer_index(), scores.raw("fisher-matrix")
    for count in range(scores.subject.gates.size + 1):
        masks = [scores.mask(name, Budget(count, {})) for name in ("fisher", "fisher(rearrange=true)")]
        search, rearranged = (float(removal_cost(mask, matrix, layers)) for mask in masks)
        assert rearranged <= search + 1e-12
    with pytest.raises(GateError, match="has no ranking"):
        scores.ranking("fisher(rearrange=true)")


def test_named_rankings_are_what_they_say(scores):
    layers = scores.subject.gates.layer_index()
    assert torch.equal(scores.ranking("his"), normalise_by_layer(scores.raw("his"), layers))
    assert torch.equal(scores.ranking("his(order=worst)"), -scores.ranking("his"))
    assert torch.equal(scores.ranking("entropy(keep=high)"), scores.raw("entropy"))
    assert torch.equal(scores.ranking("entropy"), -scores.raw("entropy"))
    ends = [scores.ranking("hies", alpha=alpha).argsort().tolist() for alpha in (1.0, 0.0)]
    assert ends == [scores.ranking("his").argsort().tolist(), scores.ranking("entropy").argsort().tolist()]
    assert not torch.equal(scores.ranking("random", seed=1), scores.ranking("random", seed=2))


def test_important_and_broad_is_the_other_end_of_entropy(scores):
    his, high = scores.ranking("his"), scores.ranking("entropy(keep=high)")
    ends = [scores.ranking("hies(keep=high)", alpha=alpha).argsort().tolist() for alpha in (1.0, 0.0)]
    assert ends == [his.argsort().tolist(), high.argsort().tolist()]
    his_rank, entropy_rank = (torch.from_numpy(rankdata(values)) for values in (his, high))
    assert torch.equal(scores.ranking("hies(combine=ranks, keep=high)"), his_rank + entropy_rank - 2)
    low = scores.ranking("hies", alpha=0.5) + scores.ranking("hies(keep=high)", alpha=0.5)
    spread = (his - his.min()) / (his.max() - his.min())
    torch.testing.assert_close(low, spread + 0.5)  # the two entropy terms are each other's complement


def test_a_head_of_each_layer_comes_first(scores):
    gates = scores.subject.gates
    for count in range(len(gates.sizes), gates.size + 1):
        expected = scores.mask("his", Budget(count, {}), minimum_per_layer=1)
        assert torch.equal(scores.mask("his(order=best-of-layer)", Budget(count, {})), expected)
    (best,) = scores.mask("his(order=best-of-layer)", Budget(1, {})).nonzero().flatten().tolist()
    per_layer = gates.size // len(gates.sizes)
    leaders = scores.ranking("his").view(-1, per_layer).argmax(1) + per_layer * torch.arange(len(gates.sizes))
    assert best in leaders.tolist()


def test_one_pass_serves_many_scores_and_is_kept(monkeypatch):
    results = {}

    def kept(name, work):
        results[name] = results.get(name) or work()
        return results[name]

    scores = make_scores(kept=kept)
    count, losses = [0], scores.subject.module.task.losses

    def counted(*arguments):
        count[0] += 1
        return losses(*arguments)

    monkeypatch.setattr(scores.subject.module.task, "losses", counted)
    ways = ("normalise=false", "granularity=token", "granularity=batch", "order=worst")
    for method in ("random", "his", "fisher", "taylor-weights", *(f"his({way})" for way in ways)):
        scores.ranking(method)
    scores.mask("fisher(rearrange=true)", Budget(3, {}))
    assert count[0] == 3  # three batches of at most five
    scores.ranking("hies(combine=ranks)")
    scores.ranking("confidence")
    assert count[0] == 6
    assert scores.cost_of("random") == Cost()
    again = make_scores(kept=kept)
    monkeypatch.setattr(again.subject.module.task, "losses", lambda *arguments: pytest.fail("computed twice"))
    assert torch.equal(again.ranking("hies(combine=ranks)"), scores.ranking("hies(combine=ranks)"))
    budget = Budget(3, {})
    assert torch.equal(again.mask("fisher(rearrange=true)", budget), scores.mask("fisher(rearrange=true)", budget))


def test_steps_do_not_pay_for_the_first_pass_twice():
    costs = {}

    def kept(name, work):
        result = work()
        costs[name] = result["forward_examples"]
        return result

    assert make_scores(kept=kept).cost_of("his(steps=10)").forward_examples == sum(costs.values())
    assert list(costs) == ["gradients", "steps"]
    assert costs["gradients"] == pytest.approx(ROWS)


def test_every_method_that_uses_a_pass_is_charged_its_peak_memory():
    costs = {"gradients": Cost(2.0, 700.0, 0, 13.0, 13.0), "attention": Cost(1.0, 300.0, 0, 13.0, 0.0)}
    scores = make_scores(kept=lambda name, work: {"scores": dict.fromkeys(PASSES[name].raws, [1.0] * 8), **asdict(costs[name])})
    assert scores.cost_of("his") == scores.cost_of("his(normalise=false)") == costs["gradients"]
    assert scores.cost_of("confidence") == costs["attention"]
    assert scores.cost_of("hies(combine=ranks)") == Cost(3.0, 700.0, 0, 26.0, 13.0)


@pytest.mark.parametrize(
    ("method", "forward", "backward"), [("his", 1, 1), ("confidence", 1, 0), ("hies(combine=ranks)", 2, 1)]
)
def test_passes_count_every_example_of_the_scoring_data_and_measure_memory(method, forward, backward):
    cost = make_scores().cost_of(method)
    assert (cost.forward_examples, cost.backward_examples) == pytest.approx((forward * ROWS, backward * ROWS))
    assert (cost.peak_memory_mb is not None) == Path("/proc/self/status").exists()
    assert cost.peak_memory_mb is None or cost.peak_memory_mb > 10


def test_names_are_checked_and_described():
    with pytest.raises(GateError, match="'best'"):
        scorer("best")
    with pytest.raises(GateError, match="'best'"):
        make_scores().raw("best")
    for found in SCORERS.values():
        assert found.source
        assert found.what
        assert set(found.raws) <= set(RAWS)


def test_the_seed_decides_a_random_mask(scores_of):
    mask = scores_of("bert").mask("random", Budget(4, {}), seed=5)
    expected = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).topk(4).indices.sort().values
    assert mask.nonzero().flatten().tolist() == expected.tolist()
