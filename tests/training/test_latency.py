"""Variants that take turns, and latency tables against planted times, which are those of the heads left in each model."""

import itertools
import math

import numpy as np
import pytest
import torch

from gates.attention.sites import find_attention, matched_sites
from gates.errors import GateError
from gates.gating.latency import TimeLimit
from tests.models import build, inputs
from training import latency
from training.latency import (
    MIN_TURNS,
    Effort,
    Spread,
    Times,
    alternate,
    measure_achieved,
    measure_table,
    site_times,
)

CPU = torch.device("cpu")


def measured(effort, names="abc"):
    """The calls in their order, and the times, of a stopwatch that counts calls and a clock that counts looks at it."""
    calls, clock = [], itertools.count()

    def stopwatch(work):
        work()
        return float(len(calls))

    variants = {name: lambda name=name: calls.append(name) for name in names}
    return calls, alternate("letters", variants, CPU, effort, stopwatch=stopwatch, clock=lambda: next(clock))


def test_variants_take_turns_in_changing_order_after_a_warm_up():
    calls, times = measured(Effort(turns=3, warm_up=2))
    assert "".join(calls) == "abccba" + "abccbaabc"
    assert times.of == {"a": [7.0, 12.0, 13.0], "b": [8.0, 11.0, 14.0], "c": [9.0, 10.0, 15.0]}  # warm-up calls are left out


@pytest.mark.parametrize(("seconds", "turns"), [(100.0, 30), (2.5, MIN_TURNS + 2), (0.0, MIN_TURNS)])
def test_it_ends_when_the_time_is_up_but_not_before_there_are_quartiles(seconds, turns):
    """The clock is looked at once at the start, and before each turn once there are enough of them."""
    calls, times = measured(Effort(turns=30, warm_up=0, seconds=seconds))
    assert {len(values) for values in times.of.values()} == {turns}
    assert len(calls) == 3 * turns


@pytest.mark.parametrize("count", [1, 2, 5, 30])
def test_median_and_quartiles_are_those_of_numpy(count):
    values = np.random.default_rng(count).exponential(size=count).tolist()
    spread = Spread.of(values)
    assert spread.median == pytest.approx(np.median(values))
    assert (spread.low, spread.high) == pytest.approx(tuple(np.percentile(values, [25, 75])))


def test_ratios_are_taken_within_turns():
    """A machine that is ten times slower in the second half changes the times, and no ratio."""
    plain = [1.0, 1.0, 1.0, 10.0, 10.0, 10.0]
    times = Times({"plain": plain, "gated": [1.5 * value for value in plain]})
    assert times.ratio("gated", "plain") == Spread(1.5, 1.5, 1.5)
    assert times.milliseconds("plain").high == pytest.approx(10)


def test_a_cpu_is_timed_by_the_wall_clock(monkeypatch):
    went = itertools.count(0, 2)
    monkeypatch.setattr("training.latency.time.perf_counter", lambda: next(went))
    assert alternate("a", {"a": int}, CPU, Effort(turns=2, warm_up=0)).of["a"] == [2000.0] * 2


COSTS = {"encoder": 1.0, "decoder": 2.0, "cross": 0.5}


def planted(model):
    """Milliseconds of a model: 5, and for each site the root of its heads by the cost of its kind."""
    return 5 + sum(COSTS[site.kind] * math.sqrt(site.heads) for site in matched_sites(model))


@pytest.fixture
def clock(monkeypatch):
    """Planted times in place of a clock's."""
    monkeypatch.setattr(latency, "_forward", lambda model, *_: lambda: model)

    def planted_times(what, variants, device, effort):
        return Times({name: [planted(work())] * 5 for name, work in variants.items()})

    monkeypatch.setattr(latency, "alternate", planted_times)


@pytest.mark.parametrize("name", ["bert", "bart"])
def test_the_table_has_the_times_of_what_is_left_of_each_site(name, clock):
    model = build(name)
    table = measure_table(model, inputs(name), "head")
    sites = find_attention(model)
    assert table.dense == pytest.approx(planted(model), abs=1e-4)
    assert table.rest == pytest.approx(5, abs=1e-4)
    for site, row in zip(sites, table.sites, strict=True):
        expected = [COSTS[site.kind] * math.sqrt(count) for count in range(site.heads + 1)]
        assert row.milliseconds == pytest.approx(expected, abs=1e-4)
    assert table.inputs["input_ids"] == list(inputs(name)["input_ids"].shape)


def test_what_is_achieved_stands_beside_what_was_predicted(clock):
    model = build("bert")
    limit = TimeLimit.parse("0.8x", measure_table(model, inputs("bert"), "head"))
    mask = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0])
    found = measure_achieved(model, mask, limit, inputs("bert"))
    assert (
        found["achieved_ms"] == pytest.approx(5 + 1 + math.sqrt(2), abs=1e-3) == pytest.approx(found["predicted_ms"], abs=1e-3)
    )
    assert found["target_ms"] == pytest.approx(0.8 * 9, abs=1e-3)
    assert found["expected_speedup"] == pytest.approx(1 / 0.8, abs=1e-3)
    assert found["speedup"]["median"] == pytest.approx(9 / found["achieved_ms"], abs=1e-3)


def test_a_real_clock_gives_a_table_that_fits_its_model():
    model = build("bert")
    table = measure_table(model, inputs("bert"), "head", Effort(turns=1, warm_up=0, seconds=0.0))
    table.check_fits({"encoder.0": 4, "encoder.1": 4}, "head")
    assert all(site.milliseconds == sorted(site.milliseconds) for site in table.sites)
    assert [site.heads for site in find_attention(model)] == [4, 4]
    assert not model.training


def test_noise_is_smoothed_without_moving_the_dense_model():
    assert site_times([2.0, 4.0, 3.0, 8.0, 6.0], [0, 1, 2, 3, 4], sites=1) == pytest.approx([0, 1.5, 1.5, 4, 4])
    assert site_times([0.0, 4.0, 8.0], [0, 2, 4], sites=2) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_heads_that_cannot_go_save_no_time():
    model = build("bert")
    find_attention(model)[0].core.register_parameter("strange", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(GateError, match="removing heads from such attention is not implemented"):
        measure_table(model, inputs("bert"), "head")
