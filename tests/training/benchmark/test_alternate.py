import itertools

import numpy as np
import pytest
import torch

from training.benchmark.alternate import LEAST, Effort, Spread, Times, alternate, order_of

CPU = torch.device("cpu")


def measured(effort, names="abc"):
    """The calls in their order, and the times, of a stopwatch that counts calls and a clock that counts looks at it."""
    calls, clock = [], itertools.count()

    def stopwatch(work):
        work()
        return float(len(calls))

    variants = {name: lambda name=name: calls.append(name) for name in names}
    return calls, alternate(variants, CPU, effort, stopwatch=stopwatch, clock=lambda: next(clock))


def test_variants_take_turns_in_changing_order_after_a_warm_up():
    calls, times = measured(Effort(turns=3, warm_up=2))
    assert "".join(calls) == "abccba" + "abccbaabc"
    assert times.of == {"a": [7.0, 12.0, 13.0], "b": [8.0, 11.0, 14.0], "c": [9.0, 10.0, 15.0]}  # warm-up calls are left out


def test_no_variant_always_follows_the_same_one():
    followers = {(a, b) for turn in range(2) for a, b in itertools.pairwise(order_of("abc", turn))}
    assert followers == {("a", "b"), ("b", "c"), ("c", "b"), ("b", "a")}


@pytest.mark.parametrize(("seconds", "turns"), [(100.0, 30), (2.5, LEAST + 2), (0.0, LEAST)])
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


def test_what_is_counted_is_what_the_effort_says(monkeypatch):
    """The clock goes on by 2 seconds while a variant works, of which the processor works 0.5 for this process."""
    went, worked = itertools.count(0, 2), itertools.count(0, 0.5)
    monkeypatch.setattr("training.benchmark.alternate.time.perf_counter", lambda: next(went))
    monkeypatch.setattr("training.benchmark.alternate.time.process_time", lambda: next(worked))
    for processor_time, expected in ((False, 2000.0), (True, 500.0)):
        times = alternate({"a": int}, CPU, Effort(turns=2, warm_up=0, processor_time=processor_time))
        assert times.of["a"] == [expected] * 2


def test_the_stopwatch_of_a_cpu_runs_the_work_once():
    calls = []
    times = alternate({"a": lambda: calls.append(1)}, CPU, Effort(turns=2, warm_up=1))
    assert len(calls) == 3
    assert all(value >= 0 for value in times.of["a"])
