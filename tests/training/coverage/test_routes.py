import pytest

from training.coverage import architectures as zoo
from training.coverage import routes
from training.coverage.routes import BY_LAYER, ROUTES, even, route_table, routes_of, uneven, uneven_keys

ALL_YES = dict.fromkeys((route.name for route in ROUTES), "yes")


@pytest.mark.parametrize(
    ("name", "refused"),
    [("Llama", {"by layer"}), ("Bert", {"stock", "by layer", "padded"}), ("NomicBert", {"by layer"})],
)
def test_a_refusal_has_its_reason(name, refused):
    cells = routes_of(zoo.BY_NAME[name])
    assert {route for route, cell in cells.items() if cell.startswith("no: ")} == refused
    assert {cell for route, cell in cells.items() if route not in refused} == {"yes"}
    own_size = "derives the size of a head from the hidden size"
    assert (own_size if name == "Bert" else "for all its layers") in cells["by layer"]


@pytest.mark.parametrize("architecture", BY_LAYER, ids=lambda row: row.name)
def test_families_that_read_numbers_by_layer(architecture):
    assert routes_of(architecture) == ALL_YES


def test_masks_are_what_their_routes_are_about():
    heads = [4, 4, 4]
    assert even(heads).view(3, 4).sum(1).tolist() == [2, 2, 2]
    assert uneven(heads).view(3, 4).sum(1).tolist() == [1, 2, 2]
    assert uneven_keys(heads).view(3, 2, 2).amax(2).sum(1).tolist() == [1, 2, 1]


def test_an_export_that_computes_something_else_is_a_failure(monkeypatch):
    """Another model is loaded than the one that was saved."""
    monkeypatch.setattr(routes, "save_pruned", lambda *_, **__: None)
    monkeypatch.setattr(routes, "_loaded", lambda directory, stock, auto, route: zoo.build(zoo.BY_NAME["Llama"], seed=1))
    cells = routes_of(zoo.BY_NAME["Llama"])
    assert all(cell.startswith("FAILED: differs by") for cell in cells.values())


def test_the_table_groups_architectures(monkeypatch):
    monkeypatch.setattr(routes, "routes_of", lambda row: {**ALL_YES, "padded": "no: why" if row.name == "Bert" else "yes"})
    lines = route_table([zoo.BY_NAME[name] for name in ("Llama", "Bert", "Qwen3")])
    assert lines[2:] == ["| yes | yes | yes | yes | yes | Llama, Qwen3 |", "| yes | yes | no | yes | yes | Bert |"]
