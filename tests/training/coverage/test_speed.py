import pytest

from gates.export.cost import count_parameters
from gates.export.kv_cache import cache_bytes_of
from gates.sites import find_attention
from training.coverage.speed import KEPT, measure, speed_table, systems


@pytest.fixture(scope="module")
def models():
    return systems()


def test_the_systems_have_the_heads_that_the_page_states(models):
    heads = {name: tuple(site.heads for site in find_attention(model)) for name, model in models.items()}
    assert heads == {"dense": (16,) * 8, "pruned": KEPT, "padded": (max(KEPT),) * 8}
    groups = {name: {site.heads // site.kv_heads for site in find_attention(model)} for name, model in models.items()}
    assert groups == {"dense": {2}, "pruned": {2}, "padded": {2}}


def test_a_row_for_each_system(models):
    lines = speed_table(models, [1, 2], prompt=4, new=2, repeats=1)
    assert lines[0].endswith("| tokens / s at batch size 1 | tokens / s at batch size 2 |")
    rows = {line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ") for line in lines[2:5]}
    for name, model in models.items():
        parameters, cache, *speeds = rows[name][1:]
        assert int(parameters.replace(",", "")) == count_parameters(model)
        assert (
            int(cache.replace(",", "")) == cache_bytes_of(model) == 4 * 2 * 32 * sum(s.kv_heads for s in find_attention(model))
        )
        assert all(float(speed) > 0 for speed in speeds)


def test_every_system_is_measured(models):
    assert measure(models, 1, prompt=3, new=2, repeats=1).keys() == models.keys()
