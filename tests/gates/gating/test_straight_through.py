import pytest
import torch

from gates.attention.sites import KINDS
from gates.gating.budget import Budget, top_k_mask
from gates.gating.families import StraightThroughTopK

KIND_INDEX = torch.tensor([KINDS.index("encoder")] * 6 + [KINDS.index("cross")] * 4)


def family(budget, log_alpha=None):
    gates = StraightThroughTopK(budget, KIND_INDEX).train()
    with torch.no_grad():
        gates.log_alpha.copy_(torch.randn(10, generator=torch.Generator().manual_seed(0)) if log_alpha is None else log_alpha)
    return gates


@pytest.mark.parametrize("budget", [Budget(3, {}), Budget(0, {}), Budget(10, {}), Budget(3, {"encoder": 1, "cross": 2})])
def test_forward_is_exactly_the_top_k_mask(budget):
    gates = family(budget)
    expected = top_k_mask(gates.log_alpha.detach(), budget, KIND_INDEX)
    assert torch.equal(gates().detach(), expected)
    assert torch.equal(gates(draws=4).detach(), expected.expand(4, -1))
    assert torch.equal(gates.eval()(), expected)


def test_backward_is_that_of_a_sigmoid_for_closed_gates_too():
    gates, weights = family(Budget(3, {})), torch.randn(10)
    (gradient,) = torch.autograd.grad((gates() * weights).sum(), gates.log_alpha)
    sigmoid = torch.sigmoid(gates.log_alpha.detach())
    torch.testing.assert_close(gradient, weights * sigmoid * (1 - sigmoid))
    (of_draws,) = torch.autograd.grad((gates(draws=5) * weights).sum(), gates.log_alpha)
    torch.testing.assert_close(of_draws, 5 * gradient)


@pytest.mark.parametrize(
    ("budget", "course"),
    [
        (Budget(2, {}), [(10,), (8,), (6,), (4,), (2,)]),
        (Budget(4, {"encoder": 2, "cross": 2}), [(6, 4), (5, 4), (4, 3), (3, 2), (2, 2)]),
        (Budget(6, {"encoder": 6, "cross": 0}), [(6, 4), (6, 3), (6, 2), (6, 1), (6, 0)]),
    ],
)
def test_the_budget_is_reached_linearly(budget, course):
    gates = family(budget)
    for progress, counts in zip((0.0, 0.25, 0.5, 0.75, 1.0), course, strict=True):
        gates.progress = progress
        mask = gates().detach()
        parts = (mask,) if len(counts) == 1 else (mask[:6], mask[6:])
        assert tuple(int(part.sum()) for part in parts) == counts
    assert gates.current_budget() == budget


def test_a_gate_closed_too_early_returns():
    """Useful heads that start behind overtake useless ones, since they have a gradient while they are closed."""
    useful = torch.tensor([0.0] * 7 + [1.0] * 3)
    gates = family(Budget(3, {}), torch.tensor([1.0] * 7 + [-1.0] * 3))
    optimizer = torch.optim.SGD(gates.parameters(), lr=1.0)
    assert float((gates().detach() * useful).sum()) == 0
    for _ in range(200):
        optimizer.zero_grad()
        (-(gates() * (useful - 0.3)).sum()).backward()
        optimizer.step()
    assert torch.equal(gates().detach(), useful)


def test_half_precision_gives_float32_gates_and_the_gradient_of_a_float32_sigmoid():
    gates = family(Budget(3, {})).to(torch.bfloat16)
    (gradient,) = torch.autograd.grad(gates().sum(), gates.log_alpha)
    assert gates().dtype == torch.float32
    sigmoid = torch.sigmoid(gates.log_alpha.detach().float())
    assert torch.equal(gradient, (sigmoid * (1 - sigmoid)).to(torch.bfloat16))
