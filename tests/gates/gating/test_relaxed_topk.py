import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.attention.sites import KINDS
from gates.gating.budget import Budget, top_k_mask
from gates.gating.families import RelaxedTopK, relaxed_top_k
from gates.gating.hard_concrete import LOG_ALPHA_LIMIT

ENCODER, CROSS = KINDS.index("encoder"), KINDS.index("cross")


def reference(scores, count, temperature):
    """Successive softmaxes in plain floats, then the excess over 1 divided among the others by their room."""
    logits, total = list(scores), [0.0] * len(scores)
    for _ in range(count):
        highest = max(logits)
        weights = [math.exp((x - highest) / temperature) for x in logits]
        chosen = [w / sum(weights) for w in weights]
        total = [t + c for t, c in zip(total, chosen, strict=True)]
        logits = [x + math.log(max(1 - c, 1e-30)) for x, c in zip(logits, chosen, strict=True)]
    excess = sum(max(0.0, t - 1) for t in total)
    room = sum(max(0.0, 1 - t) for t in total)
    return [t + excess * (1 - t) / room if t < 1 else 1.0 for t in total], total


def family(gates=6, count=2, **temperatures):
    made = RelaxedTopK(Budget(count, {}), torch.full((gates,), ENCODER))
    vars(made).update(temperatures)
    return made


@given(
    scores=st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    temperature=st.floats(0.1, 10.0),
    data=st.data(),
)
@settings(deadline=None, max_examples=80)
def test_gates_sum_to_k_and_stay_in_their_interval(scores, temperature, data):
    count = data.draw(st.integers(0, len(scores)))
    gates = relaxed_top_k(torch.tensor(scores), count, temperature)
    assert float(gates.sum()) == pytest.approx(count, abs=1e-9)
    assert bool(((gates >= 0) & (gates <= 1)).all())


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_it_is_the_sum_of_successive_softmaxes(count, temperature):
    scores = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    expected, total = reference(scores.tolist(), count, temperature)
    assert relaxed_top_k(scores, count, temperature).tolist() == pytest.approx(expected, abs=1e-9)
    if temperature == 5.0 and count == 1:
        assert max(total) < 1  # nothing to hand on: the published sum itself
        assert total == expected


def test_it_tends_to_the_hard_top_k():
    scores = torch.randn(20, generator=torch.Generator().manual_seed(0)) * 2
    hard = top_k_mask(scores, Budget(7, {}), torch.full((20,), ENCODER)).double()
    distances = [float((relaxed_top_k(scores, 7, t) - hard).abs().max()) for t in (1.0, 0.1, 0.01, 1e-3)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.3
    assert distances[-1] < 1e-6


def test_rows_are_independent():
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    together = relaxed_top_k(scores, 3, 0.5)
    for row, alone in zip(together, scores, strict=True):
        torch.testing.assert_close(row, relaxed_top_k(alone, 3, 0.5))


def test_inclusion_at_a_low_temperature_is_that_of_drawing_without_replacement():
    """Gumbel top-K: the set is drawn one by one with probabilities proportional to exp(log_alpha)."""
    log_alpha = torch.tensor([1.0, 0.3, 0.0, -0.7, -1.5])
    weights = log_alpha.exp().tolist()
    expected = [0.0] * 5
    for order in itertools.permutations(range(5), 2):
        left, probability = sum(weights), 1.0
        for chosen in order:
            probability *= weights[chosen] / left
            left -= weights[chosen]
        for chosen in order:
            expected[chosen] += probability
    gates = family(5, 2, end_temperature=0.002)
    with torch.no_grad():
        gates.log_alpha.copy_(log_alpha)
        drawn = gates.train()(torch.Generator().manual_seed(0), draws=40_000)
    assert float(((drawn < 1e-3) | (drawn > 1 - 1e-3)).float().mean()) > 0.98
    assert drawn.mean(0).tolist() == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(40_000))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_match_finite_differences(count, temperature):
    scores = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: relaxed_top_k(s, count, temperature), (scores,), atol=1e-5)


def gradient_share(temperature):
    """How many of many draws give a gradient that is not 0, all being finite."""
    gates = family(24, 8, end_temperature=temperature).train()
    with torch.no_grad():
        gates.log_alpha.uniform_(-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT, generator=torch.Generator().manual_seed(0))
    alive = []
    for seed in range(100):
        loss = (gates(torch.Generator().manual_seed(seed)) * torch.linspace(-1, 1, 24)).sum()
        (gradient,) = torch.autograd.grad(loss, gates.log_alpha)
        assert bool(gradient.isfinite().all())
        alive.append(float(gradient.abs().max() > 1e-4))
    return sum(alive) / len(alive)


def test_the_gradient_is_alive_at_the_end_and_dead_at_the_published_temperature():
    assert gradient_share(RelaxedTopK.end_temperature) > 0.9
    assert gradient_share(1e-8) == 0


def test_every_gate_is_finite_at_the_limits():
    scores = torch.tensor([LOG_ALPHA_LIMIT] * 4 + [-LOG_ALPHA_LIMIT] * 4, requires_grad=True)
    for temperature in (RelaxedTopK.start_temperature, RelaxedTopK.end_temperature, 1e-3):
        for count in (1, 4, 7):
            (gradient,) = torch.autograd.grad((relaxed_top_k(scores, count, temperature) * torch.rand(8)).sum(), scores)
            assert bool(gradient.isfinite().all())


def test_the_temperature_follows_progress():
    gates = family(start_temperature=4.0, end_temperature=0.25)
    found = []
    for progress in (0.0, 0.5, 1.0):
        gates.progress = progress
        found.append(gates.temperature)
    assert found == pytest.approx([4.0, 1.0, 0.25])


def test_kinds_have_budgets_of_their_own():
    kinds = torch.tensor([ENCODER, CROSS, ENCODER, CROSS, CROSS, ENCODER, CROSS])
    gates = RelaxedTopK(Budget(3, {"encoder": 1, "cross": 2}), kinds).train()
    drawn = gates(torch.Generator().manual_seed(0), draws=6)
    torch.testing.assert_close(drawn[:, kinds == ENCODER].sum(-1), torch.ones(6))
    torch.testing.assert_close(drawn[:, kinds == CROSS].sum(-1), torch.full((6,), 2.0))
    # Heads of other kinds are of no account: the same noise and weights in a model of one kind give the same gates.
    gates.progress = 0.5
    gumbel = torch.randn(7)
    relaxed = gates._relaxed(gumbel)
    torch.testing.assert_close(relaxed[kinds == CROSS], relaxed_top_k(gumbel[kinds == CROSS], 2, gates.temperature).float())


def test_the_expectation_is_the_relaxation_without_noise():
    gates = family(6, 2)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.linspace(-1, 1, 6))
    torch.testing.assert_close(
        gates.open_probability(), relaxed_top_k(torch.linspace(-1, 1, 6), 2, RelaxedTopK.end_temperature).float()
    )


@pytest.mark.parametrize(("gates", "count"), [(1, 0), (1, 1), (2, 0), (2, 2), (5, 5)])
def test_all_or_none_are_exact_whatever_the_scores(gates, count):
    scores = (10 * torch.randn(3, gates)).requires_grad_()
    gates = relaxed_top_k(scores, count, 0.5)
    assert torch.equal(gates, torch.full(scores.shape, float(count > 0), dtype=torch.float64))
    gates.sum().backward()  # in the graph, so that a loss can be differentiated whatever the budget
    assert bool(scores.grad.isfinite().all())


def test_gates_start_equal_and_own_their_kinds():
    kinds = torch.tensor([ENCODER, CROSS, CROSS])
    gates = RelaxedTopK(Budget(2, {"encoder": 1, "cross": 1}), kinds)
    assert gates.log_alpha.tolist() == [0.0] * 3
    assert gates.sizes == {"encoder": 1, "cross": 2}
    kinds.fill_(ENCODER)
    assert gates.kind_index.tolist() == [ENCODER, CROSS, CROSS]


def test_gates_of_a_kind_without_a_budget_of_its_own_are_shut():
    gates = RelaxedTopK(Budget(1, {"cross": 1}), torch.tensor([ENCODER, CROSS, CROSS, ENCODER])).train()
    drawn = gates(torch.Generator().manual_seed(0), draws=5)
    assert bool((drawn[:, [0, 3]] == 0).all())
