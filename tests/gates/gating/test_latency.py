"""Latency tables and limits in time: against enumeration, and what is refused."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from gates.errors import GateError
from gates.gating.latency import LatencyTable, SiteTimes, TimeLimit, convex_minorant, parse_time
from tests.gates.latency_tables import all_masks, drawn_table


@pytest.mark.parametrize("seed", range(6))
def test_the_most_gates_within_a_time_are_those_of_the_best_of_all_masks(seed):
    table = drawn_table(seed)
    for limit in (table.least, (table.least + table.dense) / 2, table.dense - 1, table.dense):
        most = max((int(mask.sum()) for mask, counts in all_masks(table) if table.time_of(counts) <= limit), default=0)
        assert table.most_within(limit) == most


def test_sites_where_more_heads_are_faster():
    odd = SiteTimes("encoder.0", [0.0, 1.5, 1.5, 3.5, 3.5], [0.0, 2.0, 1.0, 4.0, 3.0])
    even = SiteTimes("encoder.1", [0.0, 1.0, 2.0, 3.0, 4.0])
    table = LatencyTable(1.0, [odd, even])
    assert [odd.fastest_from(count) for count in range(5)] == [0, 2, 2, 4, 4]
    assert table.faster_with_more([3, 1]) == {"encoder.0": (3, 4)}
    assert table.faster_with_more([0, 3]) == table.faster_with_more([2, 4]) == {}


@pytest.mark.parametrize("seed", range(6))
def test_the_convex_minorant_is_the_largest_convex_function_below(seed):
    """At every count its value is the least that a straight line between two measured counts has there."""
    for site in drawn_table(seed, (5, 7)).sites:
        times, corners = site.milliseconds, convex_minorant(site.milliseconds)
        for (one, low), (other, high) in pairwise(corners):
            for count in range(one, other + 1):
                value = low + (high - low) * (count - one) / (other - one)
                chords = [
                    times[a] + (times[b] - times[a]) * (count - a) / (b - a) if b > a else times[a]
                    for a in range(count + 1)
                    for b in range(count, len(times))
                ]
                assert value == pytest.approx(min(chords))


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = drawn_table(0)
    table = replace(table, sites=[replace(site, measured=site.milliseconds[::-1]) for site in table.sites])
    table.write(tmp_path / "latency.json")
    assert LatencyTable.read(tmp_path / "latency.json") == table
    assert json.loads((tmp_path / "latency.json").read_text())["sites"][1]["label"] == "encoder.1"


def test_a_limit_is_read_and_reached_by_milliseconds_or_share():
    table = LatencyTable(2.0, (SiteTimes("encoder.0", (0.0, 3.0, 8.0)),))
    assert (table.dense, table.least) == (10.0, 2.0)
    assert TimeLimit.parse("7ms", table).milliseconds == TimeLimit.parse("0.7x", table).milliseconds == 7.0
    limit = TimeLimit.parse("5 ms", table)
    assert (limit.most, limit.allows([1]), limit.allows([2]), str(limit)) == (1, True, False, "5 ms")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("12 s", "'12 s'; expected a number of heads"),
        ("-3ms", "'-3ms'; expected"),
        ("ms", "'ms'; expected"),
        ("0ms", "more than 0 milliseconds"),
        ("1.5x", "a share of the dense model's time"),
        ("0x", "a share of the dense model's time"),
        ("\uff11\uff12ms", "expected a number of heads"),
    ],
)
def test_what_is_no_time_is_refused(text, said):
    with pytest.raises(GateError, match=said):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "said"), [("1ms", "takes 2 ms without any head"), ("0.1x", "which is 1 ms"), ("10ms", "nothing would be pruned")]
)
def test_a_time_that_the_model_cannot_have_is_refused(text, said):
    with pytest.raises(GateError, match=said):
        TimeLimit.parse(text, LatencyTable(2.0, (SiteTimes("encoder.0", (0.0, 3.0, 8.0)),)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected rest, unit, and sites"),
        ('{"rest": 1, "unit": "head", "sites": [{"label": "a"}]}', "expected rest, unit, and sites"),
        ('{"rest": -1, "unit": "head", "sites": [{"label": "a", "milliseconds": [0, 1]}]}', "has -1 for 'rest'"),
        ('{"rest": 1, "unit": "head", "sites": []}', "has no sites"),
        ('{"rest": 1, "unit": "head", "sites": [{"label": "a", "milliseconds": [0, NaN]}]}', "has nan for 'a'"),
        ('{"rest": 1, "unit": "head", "sites": [{"label": "a", "milliseconds": [0, 2, 1]}]}', "has 1 ms after 2 ms"),
        ('{"rest": 1, "unit": "head", "sites": [{"label": "a", "milliseconds": [0]}]}', "expected two or more"),
    ],
)
def test_a_file_without_a_sound_table_is_one_sentence(content, said, tmp_path):
    (tmp_path / "latency.json").write_text(content)
    with pytest.raises(GateError, match=said):
        LatencyTable.read(tmp_path / "latency.json")
    with pytest.raises(GateError, match="cannot read the latency table"):
        LatencyTable.read(tmp_path / "nowhere.json")


def test_a_table_of_another_model_is_refused():
    table = drawn_table(0)
    table.check_fits({"encoder.0": 2, "encoder.1": 3, "encoder.2": 3}, "head")
    for gates, unit in (({"encoder.0": 2}, "head"), ({"encoder.0": 2, "encoder.1": 3, "encoder.2": 3}, "group")):
        with pytest.raises(GateError, match="measure one of this model"):
            table.check_fits(gates, unit)
