"""Masks from elsewhere, at their own number of heads."""

import json

import pytest
import torch

from gates.errors import GateError
from gates.gating.budget import Budget
from gates.surgery.masks import save_mask
from tests.training.runs import make_pruner
from tests.training.scoring.subjects import GROUPED
from training.comparison.methods import Method, check_given_masks, given_mask, own_budget

MASK = [0, 1, 0, 0, 1, 0, 0, 1]


@pytest.fixture
def gates():
    return make_pruner().gates


@pytest.fixture
def grouped():
    """Four key/value heads with two query heads each."""
    return make_pruner(from_scratch=GROUPED, unit="group", budget=2).gates


def written(folder, content):
    path = folder / "mask.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"mask:{path}"


def test_it_is_that_of_the_file(tmp_path, gates):
    save_mask(tmp_path / "saved.json", torch.tensor(MASK).float(), gates.sites)
    for base in (written(tmp_path, {"0": [1], "1": [0, 3]}), f"mask:{tmp_path / 'saved.json'}"):
        assert given_mask(base, gates).tolist() == MASK


def test_all_seeds_have_the_mask_of_the_first(tmp_path, gates):
    base = written(tmp_path, MASK)
    first = given_mask(base, gates)
    written(tmp_path, MASK[::-1])
    assert torch.equal(given_mask(base, gates), first)


def test_groups_stay_or_go_together(tmp_path, grouped):
    assert given_mask(written(tmp_path, {"0": [0, 1], "1": [2, 3]}), grouped).tolist() == [1, 0, 0, 1]
    (tmp_path / "parts").mkdir()
    with pytest.raises(GateError, match="keeps some query heads of key/value head 2 and drops others"):
        given_mask(written(tmp_path / "parts", {"0": [0, 1], "1": [1, 2, 3]}), grouped)


@pytest.mark.parametrize("mask", [[0] * 8, [1] * 8])
def test_a_mask_that_decides_nothing_is_refused(tmp_path, gates, mask):
    with pytest.raises(GateError, match=f"keeps {sum(mask)} of 8 heads; give one to compare"):
        given_mask(written(tmp_path, mask), gates)


def parsed_for(gates, budgets):
    return [Budget.parse(budget, gates.kind_sizes()) for budget in budgets]


@pytest.mark.parametrize(("budgets", "own"), [([4, 3, 2], 3), ([0.375, 2], 0.375), ([{"encoder": 3}], {"encoder": 3})])
def test_its_budget_is_the_one_it_fills(tmp_path, gates, budgets, own):
    parsed, (expected,) = (parsed_for(gates, some) for some in (budgets, [own]))
    assert own_budget(written(tmp_path, MASK), gates, parsed) == expected


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ([4, 2], "keeps 3 of 8 heads and is compared at that alone, but the budgets keep 4, 2; add 3 to --budgets"),
        ([{"encoder": 2}], "add {'encoder': 3} to --budgets"),
    ],
)
def test_without_its_budget_it_is_refused(tmp_path, gates, budgets, said):
    methods = [Method("his"), Method(written(tmp_path, MASK))]
    parsed = parsed_for(gates, budgets)
    check_given_masks(methods[:1], gates, parsed)
    with pytest.raises(GateError, match=said):
        check_given_masks(methods, gates, parsed)
