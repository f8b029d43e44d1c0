"""Shapley values against the sum over all coalitions."""

import math
from itertools import combinations, permutations, product

import pytest
import torch
from scipy import stats

from gates.errors import GateError
from gates.gating.head_gates import HeadGates
from gates.scores.ablation import ablate
from gates.scores.shapley import ShapleyValues, removal_orders, shapley_rows
from tests.gates.scores.test_importance import losses_of
from tests.models import build, inputs


def exact(loss_of_coalition, gates):
    """The definition: marginal contributions to every coalition of the others, weighted by its size."""
    values = torch.zeros(gates, dtype=torch.float64)
    for gate in range(gates):
        others = [other for other in range(gates) if other != gate]
        for size in range(gates):
            weight = 1 / (gates * math.comb(gates - 1, size))
            for coalition in combinations(others, size):
                without = loss_of_coalition(frozenset(coalition))
                values[gate] += weight * (without - loss_of_coalition(frozenset({*coalition, gate})))
    return values


def table_of(gates, seed=0):
    """A game without any structure: a random loss for every coalition, ``[2] * gates``."""
    return torch.rand([2] * gates, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def looked_up(table):
    return lambda masks: torch.stack([table[tuple(mask.long().tolist())] for mask in masks])


def of_coalition(table):
    return lambda members: float(table[tuple(int(gate in members) for gate in range(table.dim()))])


def test_the_mean_over_all_orders_is_the_sum_over_all_coalitions():
    table = table_of(4)
    orders = torch.tensor(list(permutations(range(4))))
    rows = shapley_rows(orders, looked_up(table), tolerance=0)
    torch.testing.assert_close(rows.mean(0), exact(of_coalition(table), 4))


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_of_a_model_within_standard_errors_and_adding_up(name):
    model, batch = build(name), inputs(name)
    for parameter in model.parameters():  # so large that heads interact
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    gates = HeadGates(model).eval()
    coalitions = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 8)
    of_examples = ablate(gates, coalitions, [batch], lambda part: losses_of(model, part)).double()
    table = of_examples.mean(1).view([2] * 8)
    copies = 150  # of each example, every one with an order of its own
    orders = removal_orders(range(copies * 3), 8)

    def losses(masks):
        at = (masks.long() @ (2 ** torch.arange(7, -1, -1))).view(copies, 3)
        return of_examples[at, torch.arange(3)].flatten()

    metric, expected = ShapleyValues(8), exact(of_coalition(table), 8)
    metric.update(shapley_rows(orders, losses, tolerance=0))
    values, error = metric.compute()
    assert bool(((values - expected).abs() < 4 * error).all())
    assert bool((values.abs() > 4 * error).any())  # so the bound says something
    whole = float(table[(0,) * 8] - table[(1,) * 8])
    for tolerance in (0.0, 0.3, 0.9):
        total = shapley_rows(orders, losses, tolerance=tolerance).mean(0).sum()
        assert float(total) == pytest.approx(whole, rel=1e-9)


def test_masks_of_each_example_are_its_own():
    """The rows of a batch that walks at once are those of examples that walk alone."""
    model, batch = build("bert"), inputs("bert")
    gates, orders = HeadGates(model).eval(), removal_orders(range(3), 8)

    def losses(masks, part=batch):
        with torch.no_grad(), gates.attached(), gates.use(masks):
            return losses_of(model, part)

    together = shapley_rows(orders, losses, tolerance=0)
    for row in range(3):
        alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        own = shapley_rows(orders[row : row + 1], lambda masks, alone=alone: losses(masks, alone), tolerance=0)
        torch.testing.assert_close(together[row : row + 1], own, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("samples", [2, 3, 40])
def test_the_standard_error_is_that_of_a_sample_mean_in_any_batching(samples):
    """With Bessel's correction, against SciPy; it is unbiased: over all pairs of two values its square has the true mean."""
    rows = torch.randn(samples, 5, generator=torch.Generator().manual_seed(samples), dtype=torch.float64) + 3
    metric = ShapleyValues(5)
    for part in rows.split(2):
        metric.update(part)
    values, error = metric.compute()
    torch.testing.assert_close(values, rows.mean(0))
    torch.testing.assert_close(error, torch.from_numpy(stats.sem(rows.numpy(), axis=0)))
    pairs = [ShapleyValues(1) for _ in range(4)]
    for pair, (first, second) in zip(pairs, product([0.0, 1.0], repeat=2), strict=True):
        pair.update(torch.tensor([[first], [second]]))
    assert sum(float(pair.compute().standard_error) ** 2 for pair in pairs) / 4 == pytest.approx(0.25 / 2)


def test_walks_end_where_nothing_is_left_to_lose():
    """Once the first of two needed heads has left, the loss is that of the closed model: most of each walk can be left out."""
    calls = []

    def losses(masks):
        calls.append(masks)
        return 1.0 - masks[:, 0] * masks[:, 1]

    orders = removal_orders(range(2000), 10)
    whole = shapley_rows(orders, losses, tolerance=0).mean(0)
    full, _ = len(calls), calls.clear()
    found = shapley_rows(orders, losses, tolerance=0.1).mean(0)
    assert len(calls) < full == 11
    assert float(found.sum()) == pytest.approx(1.0)
    assert float((found - whole).abs().max()) < 0.1 / 4
    torch.testing.assert_close(whole[:2], torch.full((2,), 0.5, dtype=torch.float64), atol=0.05, rtol=0)
    assert float(whole[2:].abs().max()) == 0.0


def test_by_default_a_walk_ends_at_a_fiftieth():
    """The loss falls by a tenth of what is left with every gate that leaves, so that the share left is known at every step."""

    def losses(masks):
        closed = (masks == 0).sum(1)
        calls.append(int(closed[0]))
        return 1 - torch.where(closed == 6, torch.zeros(()), 0.1**closed)

    calls = []
    rows = shapley_rows(removal_orders(range(3), 6), losses)
    assert calls == [0, 6, 1, 2]  # a tenth is left after one gate, a hundredth after two
    torch.testing.assert_close(rows.sum(1), torch.ones(3, dtype=torch.float64))
    assert torch.equal(rows, shapley_rows(removal_orders(range(3), 6), losses, tolerance=0.02))


def test_a_walk_ends_by_the_changes_of_all_examples_also_where_they_cancel():
    """The loss of one example rises by what that of the other falls by, when the first gate leaves."""

    def losses(masks):
        calls.append(1)
        return 5 + torch.tensor([1.0, -1.0]) * (1 - masks[:, 0])

    calls = []
    rows = shapley_rows(torch.tensor([[1, 0, 2, 3], [1, 0, 3, 2]]), losses, tolerance=0.5)
    torch.testing.assert_close(rows, torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]], dtype=torch.float64))
    assert len(calls) == 4  # the dense model, the closed one, and two gates


def test_without_a_tolerance_walks_go_to_their_end():
    """Dense and closed model have the same loss here, and one model between them has another."""

    def losses(masks):
        return (masks.sum(1) == 2).float()

    rows = shapley_rows(torch.tensor([[2, 0, 1]]), losses, tolerance=0)
    assert rows.tolist() == [[-1.0, 0.0, 1.0]]


@pytest.mark.parametrize("samples", [1, 3, 1000])
def test_equal_rows_have_no_standard_error(samples):
    """Also a single one, and where the variance is rounded to less than nothing."""
    metric = ShapleyValues(3)
    metric.update(torch.tensor([0.1, -1e6 / 3, 0.7], dtype=torch.float64).expand(samples, 3))
    values, error = metric.compute()
    torch.testing.assert_close(values, torch.tensor([0.1, -1e6 / 3, 0.7], dtype=torch.float64))
    assert bool((error < 1e-2).all())


def test_rows_in_single_precision_are_summed_in_double():
    rows = 1000 + torch.randn(3000, 2, generator=torch.Generator().manual_seed(0))
    single, double = ShapleyValues(2), ShapleyValues(2)
    single.update(rows)
    double.update(rows.double())
    for found, expected in zip(single.compute(), double.compute(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_harm_is_negative():
    def losses(masks):
        return 1.0 - masks[:, 0] + 0.5 * masks[:, 1]  # the second gate does harm

    rows = shapley_rows(removal_orders(range(3), 3), losses, tolerance=0)
    torch.testing.assert_close(rows, torch.tensor([[1.0, -0.5, 0.0]], dtype=torch.float64).repeat(3, 1))


def test_an_order_belongs_to_its_example():
    orders = removal_orders(range(6), 5)
    assert torch.equal(removal_orders(range(1, 6, 2), 5), orders[1::2])
    assert all(sorted(order.tolist()) == list(range(5)) for order in orders)
    assert not torch.equal(removal_orders(range(6), 5, seed=1), orders)


def test_bad_input_is_named():
    with pytest.raises(GateError, match=r"-0\.1"):
        shapley_rows(removal_orders(range(2), 3), lambda masks: masks.sum(1), tolerance=-0.1)
    with pytest.raises(GateError, match=r"\[1, 3\]"):
        ShapleyValues(4).update(torch.zeros(1, 3))
