"""The expected time of gates and its slopes."""

import pytest
import torch

from gates.gating.hard_concrete import LOG_ALPHA_LIMIT, Stretch, open_probability
from gates.gating.latency import LatencyTable, SiteTimes, TimeLimit, convex_minorant
from gates.gating.price import RelaxedTime
from tests.gates.latency_tables import all_masks, drawn_table

STRETCH = Stretch()


def at_limits(mask):
    return open_probability(torch.where(mask > 0, LOG_ALPHA_LIMIT, -LOG_ALPHA_LIMIT), STRETCH)


@pytest.mark.parametrize("seed", range(4))
def test_gates_at_their_limits_take_what_the_minorants_say(seed):
    table = drawn_table(seed)
    time = RelaxedTime(TimeLimit(3.0, table), STRETCH)
    minorants = [dict(convex_minorant(site.milliseconds)) for site in table.sites]
    for mask, counts in all_masks(table):
        found = float(time.time(at_limits(mask)))
        assert found <= table.time_of(counts) + 1e-4
        if all(count in minorant for count, minorant in zip(counts, minorants, strict=True)):
            assert found == pytest.approx(table.time_of(counts), abs=1e-4)


def test_costs_are_the_gradient_of_the_time():
    table = drawn_table(1, (4, 4, 5))
    time = RelaxedTime(TimeLimit(3.0, table), STRETCH)
    probability = (0.2 + 0.6 * torch.rand(13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).requires_grad_()
    (gradient,) = torch.autograd.grad(time.time(probability), probability)
    torch.testing.assert_close(time.costs(probability.detach()), gradient * (time.opened - time.closed))


def test_many_gates_at_once_are_each_for_themselves():
    time = RelaxedTime(TimeLimit(3.0, drawn_table(2)), STRETCH)
    probabilities = torch.rand(5, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(time.time(probabilities), torch.stack([time.time(one) for one in probabilities]))


def test_where_the_table_is_flat_a_gate_still_costs_something():
    """The last gate of four is free in the table, but closing more would save time."""
    table = LatencyTable(0.0, (SiteTimes("encoder.0", (0.0, 1.0, 4.0, 8.0, 8.0)),))
    costs = RelaxedTime(TimeLimit(4.0, table), STRETCH).costs(at_limits(torch.ones(4)))
    torch.testing.assert_close(costs, torch.full((4,), 7 / 3, dtype=torch.float64))
