"""Swaps and draws on a real model: against losses computed by hand, and nothing left changed."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gates.errors import GateError
from gates.gating.budget import Budget
from gates.search.sampled_masks import draw_masks
from tests.training.runs import make_data, make_pruner, make_trainer
from training.config import DrawSearch, SwapSearch
from training.scoring.mask_search import calibration, draw, losses_of, refine
from training.scoring.subject import ScoringContext


@pytest.fixture(scope="module")
def trained():
    """A tiny model after some ordinary training, so that heads differ."""
    pruner, data = make_pruner(finetune=4.0), make_data(train_rows=512)
    make_trainer(max_steps=48).fit(pruner, data)
    return ScoringContext(pruner, data, make_trainer())


def state(pruner):
    return {name: tensor.clone() for name, tensor in pruner.state_dict().items() if torch.is_tensor(tensor)}


@contextmanager
def unchanged(subject):
    """What a search must leave as it was: weights, gates, training mode and which weights train."""
    pruner = subject.module.train()
    before, mode = state(pruner), pruner.gates.mode
    yield
    assert pruner.gates.mode == mode
    assert all(part.training for part in pruner.modules())
    assert all(parameter.requires_grad for parameter in pruner.backbone.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in state(pruner).items())


def mean_loss(subject, loader, mask):
    """One example after another."""
    total, rows = 0.0, 0
    with subject.at_rest(), torch.no_grad(), subject.gates.use(mask):
        for batch in loader:
            for row in range(len(batch["labels"])):
                one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
                total += float(subject.losses(one).sum())
                rows += 1
    return total / rows


def test_losses_are_those_of_the_deciding_half_and_fall(trained):
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0, 0, 0])
    with unchanged(trained):
        found = refine(trained, mask, SwapSearch(rows=128, passes=12), budget=Budget(3, {}))
    _, deciding = trained.data.calibration_dataloaders(128)
    assert found.losses[0] == pytest.approx(mean_loss(trained, deciding, mask), abs=1e-5)
    assert found.losses[-1] == pytest.approx(mean_loss(trained, deciding, found.mask), abs=1e-5)
    assert found.mask.sum() == 3
    assert found.losses[-1] <= found.losses[0]


def test_the_two_halves_share_no_example(trained):
    data = trained.data
    batches = [[batch["input_ids"] * batch["attention_mask"] for batch in half] for half in data.calibration_dataloaders(256)]
    halves = [{tuple(row[row != 0].tolist()) for ids in half for row in ids} for half in batches]
    texts = [tuple(ids) for ids in data.splits["train"]["input_ids"]]
    repeated = {text for text in texts if texts.count(text) > 1}
    assert not (halves[0] & halves[1]) - repeated
    assert sum(map(len, halves)) >= 200


def test_the_best_draw_is_that_of_the_deciding_half(trained):
    """With so few draws that all are finalists, against the losses of all of them."""
    scores, mask = torch.linspace(1, -1, 8), torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0])
    options = {"count": 4, "temperature": 1.0}
    with unchanged(trained):
        found = draw(trained, mask, scores, DrawSearch(rows=128, **options), budget=Budget(3, {}), seed=1)
    gates = trained.gates
    places = {"kind_index": gates.kind_index(), "layer_index": gates.layer_index()}
    others = draw_masks(scores, Budget(3, {}), **places, **options, seed=1)
    assert any(not torch.equal(other, mask) for other in others)
    _, deciding = trained.data.calibration_dataloaders(128)
    losses = [mean_loss(trained, deciding, one) for one in (mask, *others)]
    assert found.losses == pytest.approx((losses[0], min(losses)), abs=1e-5)
    assert mean_loss(trained, deciding, found.mask) == pytest.approx(found.losses[1], abs=1e-5)


def test_losses_of_masks_are_those_of_the_deciding_half_also_of_equal_ones(trained):
    masks = [torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0]), torch.ones(8), torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0])]
    with unchanged(trained):
        losses = losses_of(trained, masks, 16)
    _, deciding = trained.data.calibration_dataloaders(16)
    assert losses == pytest.approx([mean_loss(trained, deciding, mask) for mask in masks], rel=1e-5)
    assert losses[0] == losses[2] != losses[1]


def test_a_search_that_fails_leaves_all_as_it_was(trained, monkeypatch):
    def fails(*arguments, **more):
        raise RuntimeError("stopped")

    monkeypatch.setattr("training.scoring.mask_search.refine_by_swaps", fails)
    frozen = trained.backbone.classifier.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="stopped"):
        refine(trained, torch.ones(8), SwapSearch(), budget=Budget(8, {}))
    assert not frozen.requires_grad
    frozen.requires_grad_(True)
    with unchanged(trained), pytest.raises(RuntimeError, match="stopped"):
        refine(trained, torch.ones(8), SwapSearch(), budget=Budget(8, {}))


@pytest.mark.parametrize(
    ("search", "options", "match"),
    [
        (SwapSearch, {"rows": 3}, "expected at least 4"),
        (SwapSearch, {"passes": 5}, "expected at least 6"),
        (DrawSearch, {"rows": 1}, "--draws.rows is"),
        (DrawSearch, {"count": 0}, "--draws.count is"),
        (DrawSearch, {"temperature": 0.0}, "--draws.temperature is"),
    ],
)
def test_a_search_that_can_do_nothing_is_refused(search, options, match):
    with pytest.raises(GateError, match=match):
        search(**options)


def decide_on_a_share(rank, world, folder):
    """One of several processes with its share of the deciding half; every process writes the losses and means it has."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)

    def reduce(values, reduce_op):
        assert reduce_op == "sum"
        torch.distributed.all_reduce(values)
        return values

    pruner, data, trainer = make_pruner(), make_data(train_rows=64, score_rows=16, batch_size=2), make_trainer()
    strategy = SimpleNamespace(
        reduce=reduce, root_device=trainer.strategy.root_device, precision_plugin=trainer.strategy.precision_plugin
    )
    data.trainer = SimpleNamespace(global_rank=rank, world_size=world, lightning_module=None, strategy=strategy)
    subject = ScoringContext(pruner, data, SimpleNamespace(global_rank=rank, world_size=world, strategy=strategy))
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0, 0, 0])
    with calibration(subject, 26) as found:
        mean = found.loss(mask, 1.0, found.proposing)
        torch.save((found.losses(mask), mean), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_decide_on_the_same_losses_as_one(tmp_path):
    """13 examples in two unequal shares: the same losses everywhere, those of one process in another order."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for world, folder in ((1, tmp_path / "one"), (2, tmp_path / "two")):
        torch.multiprocessing.spawn(decide_on_a_share, (world, str(folder)), nprocs=world)
    losses, mean = torch.load(tmp_path / "one" / "0.pt", weights_only=True)
    first, second = (torch.load(tmp_path / "two" / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first[0], second[0])
    assert len(losses) == 13
    torch.testing.assert_close(first[0].sort().values, losses.sort().values, atol=1e-6, rtol=1e-5)
    assert first[1] == second[1] == pytest.approx(mean, abs=1e-6)
