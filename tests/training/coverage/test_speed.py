import pytest
import torch

from gates.export.checkpoint import load_pruned
from gates.export.cost import count_parameters
from gates.export.kv_cache import cache_bytes_of
from gates.sites import find_attention
from training.coverage import speed
from training.coverage.speed import KEPT, Effort, exports, measure, speed_table
from training.coverage.writers import Way


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: load_pruned(folder) for name, folder in exports(tmp_path_factory.mktemp("exports")).items()}


def in_no_time(export):
    return lambda ids, new: torch.zeros(len(ids), new)


def test_the_systems_have_the_heads_that_the_page_states(models):
    heads = {name: tuple(site.heads for site in find_attention(model)) for name, model in models.items()}
    assert heads == {"dense": (16,) * 8, "pruned": KEPT, "padded": (max(KEPT),) * 8}
    groups = {name: {site.heads // site.kv_heads for site in find_attention(model)} for name, model in models.items()}
    assert groups == {"dense": {2}, "pruned": {2}, "padded": {2}}


def test_a_row_for_each_model_and_for_each_way(models):
    ways = [
        Way("one", in_no_time),
        Way("two", in_no_time, lacks="it is not here"),
        Way("three", in_no_time, ("no_such_package",)),
    ]
    lines = speed_table(ways, [1, 2], Effort(prompt=4, new=2, repeats=1))
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ")[1:] for line in lines if line.startswith("|")
    }
    for name, model in models.items():
        parameters, cache = (int(cell.replace(",", "")) for cell in rows[name])
        assert parameters == count_parameters(model)
        assert cache == cache_bytes_of(model) == 4 * 2 * 32 * sum(site.kv_heads for site in find_attention(model))
    assert rows["tokens / s"] == [f"{name}, batch {size}" for size in (1, 2) for name in models]
    assert all(float(cell) > 0 for cell in rows["one"])
    assert rows["two"] == ["not tried: it is not here"] * 6
    assert rows["three"] == ["not tried: no_such_package not installed"] * 6


def test_the_median_of_calls_in_turn(monkeypatch):
    """By a clock that only the writers move; the first call of each is not timed."""
    clock, calls = [0.0], []
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])

    def writer(name, seconds):
        left = iter(seconds)

        def write(ids, new):
            calls.append(name)
            assert ids.shape == (2, 3)
            clock[0] += next(left)

        return write

    cells = {("a", "dense"): writer("a", [99, 1, 2, 9]), ("b", "dense"): writer("b", [99, 4, 4, 1])}
    found = measure(cells, 2, Effort(prompt=3, new=10, repeats=3))
    assert found == {("a", "dense"): "10", ("b", "dense"): "5"}
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]


def test_what_fails_is_said_and_not_called_again():
    calls = []

    def fail(ids, new):
        calls.append(len(ids))
        raise RuntimeError("out of luck\nat all")

    found = measure({("a", "dense"): fail, ("b", "dense"): "no: it did not load"}, 1, Effort(prompt=3, new=2, repeats=4))
    assert found == {("a", "dense"): "no: RuntimeError: out of luck", ("b", "dense"): "no: it did not load"}
    assert calls == [1]
