"""Swaps and draws on a real model: against losses computed by hand, and nothing left changed."""

import pytest
import torch

from gates.budget import Budget
from gates.errors import GateError
from gates.search.sampled_masks import draw_masks
from tests.training.runs import make_data, make_pruner, make_trainer
from training.scoring.mask_search import DrawSearch, SwapSearch, draw, refine


@pytest.fixture(scope="module")
def trained():
    """A tiny model after some ordinary training, so that heads differ."""
    pruner, data = make_pruner(finetune=4.0), make_data(train_rows=512)
    make_trainer(max_steps=48).fit(pruner, data)
    return pruner, data


def mean_loss(pruner, data, loader, mask):
    """One example after another."""
    gates, total, rows = pruner.gates, 0.0, 0
    with torch.no_grad(), gates.use(mask):
        for batch in loader:
            for row in range(len(batch["labels"])):
                one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
                total += float(pruner.task.losses(pruner.backbone, one)[0].sum())
                rows += 1
    return total / rows


def test_losses_are_those_of_the_deciding_half_and_fall(trained):
    pruner, data = trained
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0, 0, 0])
    pruner.train()
    before = {name: tensor.clone() for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor)}
    found = refine(pruner, data, make_trainer(), mask, SwapSearch(rows=128, passes=12), budget=Budget(3, {}))
    assert pruner.backbone.training
    assert all(parameter.requires_grad for parameter in pruner.backbone.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor))
    pruner.eval()
    _, deciding = data.calibration_dataloaders(128)
    assert found.losses[0] == pytest.approx(mean_loss(pruner, data, deciding, mask), abs=1e-5)
    assert found.losses[-1] == pytest.approx(mean_loss(pruner, data, deciding, found.mask), abs=1e-5)
    assert found.mask.sum() == 3
    assert found.losses[-1] <= found.losses[0]


def test_the_two_halves_share_no_example(trained):
    _, data = trained
    halves = [
        {
            tuple(row[mask.bool()].tolist())
            for batch in loader
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        }
        for loader in data.calibration_dataloaders(256)
    ]
    texts = [tuple(ids) for ids in data.splits["train"]["input_ids"]]
    repeated = {text for text in texts if texts.count(text) > 1}
    assert not (halves[0] & halves[1]) - repeated
    assert sum(map(len, halves)) >= 200


def test_budgets_of_kinds_are_kept(trained):
    """With a budget per kind, heads are swapped within their kind only; here there is one kind, so the same mask comes out."""
    pruner, data = trained
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0, 0, 0])
    search = SwapSearch(rows=64, passes=8)
    plain = refine(pruner, data, make_trainer(), mask, search, budget=Budget(3, {})).mask
    per_kind = refine(pruner, data, make_trainer(), mask, search, budget=Budget(3, {"encoder": 3})).mask
    assert torch.equal(per_kind, plain)


def test_the_best_draw_is_that_of_the_deciding_half(trained):
    """With so few draws that all are finalists, against the losses of all of them."""
    pruner, data = trained
    scores, mask = torch.linspace(1, -1, 8), torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    pruner.train()
    before = {name: tensor.clone() for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor)}
    options = {"count": 4, "temperature": 1.0}
    found = draw(pruner, data, make_trainer(), mask, scores, DrawSearch(rows=128, **options), budget=Budget(3, {}), seed=1)
    assert pruner.backbone.training
    assert all(parameter.requires_grad for parameter in pruner.backbone.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor))
    gates = pruner.gates
    places = {"kind_index": gates.kind_index(), "layer_index": gates.layer_index()}
    others = draw_masks(scores, Budget(3, {}), **places, **options, seed=1)
    assert any(not torch.equal(other, mask) for other in others)
    pruner.eval()
    _, deciding = data.calibration_dataloaders(128)
    losses = [mean_loss(pruner, data, deciding, one) for one in (mask, *others)]
    assert found.losses == pytest.approx((losses[0], min(losses)), abs=1e-5)
    assert mean_loss(pruner, data, deciding, found.mask) == pytest.approx(found.losses[1], abs=1e-5)


@pytest.mark.parametrize(("options", "least"), [({"rows": 1}, 2), ({"passes": 5}, 6)])
def test_a_search_that_can_do_nothing_is_refused(options, least):
    with pytest.raises(GateError, match=f"expected at least {least}"):
        SwapSearch(**options)


@pytest.mark.parametrize("options", [{"rows": 1}, {"count": 0}, {"temperature": 0.0}])
def test_draws_that_can_do_nothing_are_refused(options):
    (name,) = options
    with pytest.raises(GateError, match=f"--draws.{name} is"):
        DrawSearch(**options)


@pytest.mark.parametrize("retrain", [1.0, 0.0])
def test_a_run_can_end_its_prune_phase_with_swaps(retrain):
    """The final mask is what a search finds from the gates' mask on the weights of that moment, whether it is retrained or not."""
    options = {"finetune": 2.0, "learning_rate": 3e-3, "retrain": retrain}
    plain, data = make_pruner(**options), make_data()
    make_trainer(max_steps=48).fit(plain, data)  # the end of the prune phase
    expected = refine(plain, data, make_trainer(), plain.learned_mask(), SwapSearch(passes=20), budget=plain.budget).mask
    swapping = make_pruner(**options, swaps=20)
    make_trainer().fit(swapping, make_data())
    assert torch.equal(swapping.gates.mask, expected)
    assert int(expected.sum()) == 3


def test_too_few_swaps_are_refused():
    with pytest.raises(GateError, match="swaps is 5"):
        make_pruner(swaps=5)
