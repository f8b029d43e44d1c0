import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from gates.errors import GateError
from gates.gating.hard_concrete import (
    LOG_ALPHA_LIMIT,
    HardConcrete,
    Stretch,
    evaluation_gates,
    open_probability,
    sample_gates,
)

DRAWS = 200_000
LOG_ALPHAS = [-2.0, -0.5, 0.0, 1.0, 3.0]
STRETCHES = [Stretch(0.33), Stretch(2 / 3), Stretch(0.5, -0.3, 1.2)]


def gate_at(u: float, log_alpha: float, stretch: Stretch) -> float:
    """The sampling formula written again, in plain floats."""
    s = 1 / (1 + math.exp(-(math.log(u) - math.log(1 - u) + log_alpha) / stretch.temperature))
    return min(1.0, max(0.0, s * (stretch.high - stretch.low) + stretch.low))


def expectation(f, log_alpha: float, stretch: Stretch) -> float:
    """E f(z) by quadrature over the noise, split at the two clipping points."""
    cuts = []
    for edge in (0.0, 1.0):
        s = (edge - stretch.low) / (stretch.high - stretch.low)
        logit = stretch.temperature * math.log(s / (1 - s)) - log_alpha
        cuts.append(1 / (1 + math.exp(-logit)))
    points = [1e-12, *cuts, 1 - 1e-12]
    return sum(
        integrate.quad(lambda u: f(gate_at(u, log_alpha, stretch)), a, b, limit=200)[0] for a, b in itertools.pairwise(points)
    )


@pytest.mark.parametrize("stretch", STRETCHES)
@pytest.mark.parametrize("log_alpha", LOG_ALPHAS)
def test_samples_follow_the_closed_forms(log_alpha, stretch):
    gates = sample_gates(torch.full((DRAWS,), log_alpha), stretch, generator=torch.Generator().manual_seed(0))
    p_open = open_probability(torch.tensor(log_alpha), stretch)
    at_one = (1 - stretch.low) / (stretch.high - stretch.low)  # of the variable before it is stretched and clipped
    p_full = torch.sigmoid(torch.tensor(log_alpha - stretch.temperature * math.log(at_one / (1 - at_one))))
    error = 5 * 0.5 / math.sqrt(DRAWS)
    assert float((gates > 0).float().mean()) == pytest.approx(float(p_open), abs=error)
    assert float((gates == 1).float().mean()) == pytest.approx(float(p_full), abs=error)
    assert float(gates.mean()) == pytest.approx(expectation(lambda z: z, log_alpha, stretch), abs=error)


@pytest.mark.parametrize("log_alpha", LOG_ALPHAS)
def test_gradient_is_that_of_the_expectation(log_alpha):
    stretch, step = Stretch(2 / 3), 1e-3
    parameter = torch.full((DRAWS,), log_alpha, requires_grad=True)
    loss = (sample_gates(parameter, stretch, generator=torch.Generator().manual_seed(1)) - 0.3).square()
    (gradient,) = torch.autograd.grad(loss.sum(), parameter)
    difference = (
        expectation(lambda z: (z - 0.3) ** 2, log_alpha + step, stretch)
        - expectation(lambda z: (z - 0.3) ** 2, log_alpha - step, stretch)
    ) / (2 * step)
    standard_error = float(gradient.std()) / math.sqrt(DRAWS)
    assert float(gradient.mean()) == pytest.approx(difference, abs=5 * standard_error + 1e-5)


@given(log_alpha=st.floats(-4.6, 4.6), temperature=st.floats(0.1, 1.0))
@settings(deadline=None, max_examples=50)
def test_gradient_of_expected_l0_matches_finite_differences(log_alpha, temperature):
    stretch = Stretch(temperature)
    parameter = torch.tensor([log_alpha], dtype=torch.float32, requires_grad=True)
    (gradient,) = torch.autograd.grad(open_probability(parameter, stretch).sum(), parameter)
    shift = temperature * math.log(-stretch.low / stretch.high)
    p = 1 / (1 + math.exp(-(log_alpha - shift)))
    assert float(gradient) == pytest.approx(p * (1 - p), rel=1e-3, abs=1e-6)


def test_evaluation_gate_is_exactly_closed_and_open_at_log_11():
    edge = math.log(11)
    values = evaluation_gates(torch.tensor([-edge - 1e-4, -edge + 1e-3, edge - 1e-3, edge + 1e-4]))
    assert values[0] == 0
    assert values[1] > 0
    assert values[2] < 1
    assert values[3] == 1


def test_clamp_keeps_log_alpha_within_its_limits():
    gates = HardConcrete(2)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-50.0, 50.0]))
    gates.clamp_()
    assert gates.log_alpha.tolist() == pytest.approx([-LOG_ALPHA_LIMIT, LOG_ALPHA_LIMIT])


def test_the_temperature_is_annealed_with_progress():
    gates = HardConcrete(4, stretch=Stretch(0.8), anneal=0.05)
    found, open_probabilities = [], []
    for progress in (0.0, 0.5, 1.0):
        gates.progress = progress
        found.append(gates.stretch.temperature)
        open_probabilities.append(float(gates.open_probability()[0].detach()))
        assert gates.open_probability()[0] == open_probability(gates.log_alpha, Stretch(found[-1]))[0]
    assert found == pytest.approx([0.8, 0.2, 0.05])
    assert HardConcrete(4, stretch=Stretch(0.8)).stretch == Stretch(0.8)


def test_annealed_gates_become_hard():
    gates = HardConcrete(4000, initial_log_alpha=0.0, anneal=0.02)
    shares = []
    for progress in (0.0, 1.0):
        gates.progress = progress
        drawn = gates(torch.Generator().manual_seed(0))
        shares.append(float(((drawn == 0) | (drawn == 1)).float().mean()))
    assert shares[0] < 0.9
    assert shares[1] > 0.97


def test_rounding_can_start_on_the_way():
    gates = HardConcrete(500, initial_log_alpha=0.0, straight_through_from=0.5)
    hard = HardConcrete(500, initial_log_alpha=0.0, straight_through=True)
    for progress, is_hard in ((0.0, False), (0.4, False), (0.5, True), (1.0, True)):
        gates.progress = progress
        drawn = gates(torch.Generator().manual_seed(3))
        assert gates.rounds == is_hard
        assert torch.equal(
            drawn, (hard if is_hard else HardConcrete(500, initial_log_alpha=0.0))(torch.Generator().manual_seed(3))
        )
    assert not HardConcrete(5).rounds


@pytest.mark.parametrize("draws", [None, 50])
def test_straight_through_gates_are_exactly_zero_or_one(draws):
    gates = HardConcrete(1000, initial_log_alpha=0.3, straight_through=True)
    found = gates.train()(torch.Generator().manual_seed(0), draws=draws)
    assert set(found.unique().tolist()) == {0.0, 1.0}
    soft = HardConcrete(1000, initial_log_alpha=0.3)
    expected = soft.train()(torch.Generator().manual_seed(0), draws=draws)
    (gradient,) = torch.autograd.grad(found.sum(), gates.log_alpha)
    assert torch.equal(gradient, torch.autograd.grad(expected.sum(), soft.log_alpha)[0])


def test_evaluation_gates_are_those_of_their_stretch():
    stretch, gates = Stretch(0.5, -0.3, 1.2), HardConcrete(5, stretch=Stretch(0.5, -0.3, 1.2)).eval()
    with torch.no_grad():
        gates.log_alpha.copy_(torch.linspace(-3, 3, 5))
    unit = torch.sigmoid(gates.log_alpha.detach())
    expected = (unit * (stretch.high - stretch.low) + stretch.low).clamp(0, 1)
    torch.testing.assert_close(gates().detach(), expected)


def test_gates_start_where_the_description_says():
    assert HardConcrete(3).log_alpha.tolist() == [2.5] * 3
    assert HardConcrete(3, initial_log_alpha=9).log_alpha.tolist() == pytest.approx([LOG_ALPHA_LIMIT] * 3)


def test_a_temperature_may_stay_and_rounding_may_start_at_once():
    assert HardConcrete(3, stretch=Stretch(0.5), anneal=0.5).stretch == Stretch(0.5)
    rounded = HardConcrete(3, straight_through_from=0.0)
    rounded.progress = 0.0
    assert rounded.rounds


@pytest.mark.parametrize(
    "make",
    [
        *(
            lambda options=options: HardConcrete(3, **options)
            for options in ({"anneal": 0.0}, {"anneal": 0.5}, {"straight_through_from": 1.5}, {"straight_through_from": -0.5})
        ),
        *(
            lambda options=options: Stretch(**options)
            for options in ({"temperature": 0.0}, {"low": 0.1}, {"high": 0.9}, {"low": 0.0}, {"high": 1.0})
        ),
    ],
)
def test_options_out_of_range_are_refused(make):
    """A stretch has to contain 0 and 1, or no gate would be 0, or 1, with a probability above 0."""
    with pytest.raises(GateError, match=r"expected|must"):
        make()


def test_straight_through_is_hard_forward_and_soft_backward():
    hard, soft = HardConcrete(500, initial_log_alpha=0.0, straight_through=True), HardConcrete(500, initial_log_alpha=0.0)
    z_hard, z_soft = (gates(torch.Generator().manual_seed(3)) for gates in (hard, soft))
    torch.testing.assert_close(z_hard.detach(), (z_soft > 0).float())
    weights = torch.randn(500)
    gradients = [torch.autograd.grad((weights * z).sum(), g.log_alpha)[0] for z, g in ((z_hard, hard), (z_soft, soft))]
    torch.testing.assert_close(*gradients)
