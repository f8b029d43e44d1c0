import torch

from gates.gating.families import MEMORY, ClampedLinear, slowed
from gates.gating.price import l0_penalty


def close_under_a_price(usefulness, price, steps=300, *, worth=lambda z: z - z.square() / 2):
    """Gates after training where head i is worth usefulness[i] * worth(z), at a price that ramps up."""
    gates = ClampedLinear(len(usefulness)).train()
    optimizer = torch.optim.Adam(gates.parameters(), lr=0.02)
    for step in range(steps):
        z = gates()
        ramp = min(1.0, (step + 1) / (0.6 * steps))
        loss = -(usefulness * worth(z)).sum() + ramp * l0_penalty(gates.open_probability(), price)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        gates.clamp_()
    return gates


def test_gates_start_fully_open_and_are_clamped():
    gates = ClampedLinear(4)
    assert torch.equal(gates(), torch.ones(4))
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-3.3, 0.1, 0.7, 2.9]))
    for values in (gates.train()(), gates.eval()(), gates.open_probability()):
        torch.testing.assert_close(values, torch.tensor([0.0, 0.1, 0.7, 1.0]), rtol=0, atol=0)


def test_the_gradient_passes_the_clamp():
    gates, weights = ClampedLinear(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-3.3, 0.1, 0.7, 2.9]))
    (gradient,) = torch.autograd.grad((gates(draws=3) * weights).sum(), gates.log_alpha)
    torch.testing.assert_close(gradient, 3 * weights)


def test_the_price_closes_the_useless():
    """A head worth u * (z - z^2 / 2) at price p stays open by z = 1 - p / u, or closes where p > u."""
    usefulness = torch.tensor([0.0, 0.2, 0.5, 2.0, 4.0])
    z = close_under_a_price(usefulness, 1.0)()
    torch.testing.assert_close(z, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.75]), atol=0.05, rtol=0)
    assert torch.equal(z == 0, usefulness < 1)


def test_closed_gates_keep_their_order():
    """Those that would be equal at 0 rank by when they closed, so that any budget can be cut."""
    usefulness = torch.tensor([0.3, 0.1, 0.8, 0.55, 0.0])
    gates = close_under_a_price(usefulness, 1.0, worth=lambda z: z)
    assert torch.equal(gates(), torch.zeros(5))
    assert torch.equal(gates.log_alpha.argsort(), usefulness.argsort())
    assert bool((gates.log_alpha > -301 * MEMORY).all())


def test_equal_gates_are_told_apart_by_the_push():
    before, after = torch.full((3,), 0.01), torch.tensor([-0.04, -0.05, -0.03])
    for _ in range(200):
        before, after = slowed(before, after), slowed(before, after) + torch.tensor([-0.04, -0.05, -0.03])
    assert before.argsort().tolist() == [1, 0, 2]


def test_a_closed_gate_opens_again_soon():
    gates = ClampedLinear(1).train()
    optimizer = torch.optim.SGD(gates.parameters(), lr=0.05)

    def step(slope):
        optimizer.zero_grad()
        (gates() * slope).sum().backward()
        optimizer.step()
        gates.clamp_()
        return float(gates.eval().train()().detach())

    assert [step(1.0) for _ in range(520)][-1] == 0.0
    assert any(step(-1.0) > 0 for _ in range(2))


def test_inside_nothing_is_slowed():
    before, after = torch.rand(50), torch.rand(50)
    assert torch.equal(slowed(before, after), after)
    assert torch.equal(slowed(torch.tensor([-0.02, 1.03]), torch.tensor([-0.01, 1.01])), torch.tensor([-0.01, 1.01]))
    beyond = slowed(torch.tensor([-0.02, 1.03, 0.5, 0.5]), torch.tensor([-0.5, 2.0, -0.5, 2.0]))
    torch.testing.assert_close(beyond, torch.tensor([-0.0201, 1.0301, -0.0001, 1.0001]), atol=1e-6, rtol=0)


def test_a_push_as_large_as_the_memory_goes_half_as_far():
    before, push = torch.full((2,), 0.5, dtype=torch.float64), torch.tensor([1 + MEMORY, -MEMORY], dtype=torch.float64)
    expected = torch.tensor([1 + MEMORY / 2, -MEMORY / 2], dtype=torch.float64)
    torch.testing.assert_close(slowed(before, push), expected, rtol=0, atol=1e-12)


def test_a_step_is_slowed_once():
    gates = ClampedLinear(2).train()
    gates()
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-0.3, 1.4]))
    gates.clamp_()
    once = gates.log_alpha.detach().clone()
    gates.clamp_()
    assert torch.equal(gates.log_alpha.detach(), once)
    with torch.no_grad():
        gates.log_alpha.copy_(torch.tensor([-3.0, 4.0]))  # a checkpoint, not a step
    gates.clamp_()
    assert gates.log_alpha.tolist() == [-3.0, 4.0]
