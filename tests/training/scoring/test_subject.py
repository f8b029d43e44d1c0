"""A model at rest, and everything as before afterwards."""

import pytest
import torch
from torch import nn

from tests.training.scoring.subjects import make_subject
from training.scoring.subject import at_rest


@pytest.fixture(scope="module")
def subject():
    return make_subject()


def flags(module):
    return [part.training for part in module.modules()]


@pytest.fixture
def mixed(subject):
    """A module with some parts in training mode, as under frozen layers, and with a mask."""
    module = subject.module.train()
    for index, part in enumerate(module.backbone.modules()):
        part.training = index % 3 == 0
    module.gates.learned.eval()
    module.gates.set_mask_(torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0]))
    yield module
    module.train()
    module.gates.mode = "open"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", ["open", "stochastic", "masked"])
def test_afterwards_every_part_is_as_before_also_if_the_work_fails(mode, fails, mixed):
    mixed.gates.mode = mode
    before, mask = flags(mixed), mixed.gates.mask.clone()
    assert True in before
    assert False in before
    try:
        with at_rest(mixed):
            assert mixed.gates.mode == "open"
            assert not any(flags(mixed))
            mixed.backbone.train()  # whatever the work does
            mixed.gates.mode = "stochastic"
            mixed.backbone.bert.encoder.layer[0].eval()
            mixed.eval()
            if fails:
                raise RuntimeError("stopped")
    except RuntimeError:
        assert fails
    assert flags(mixed) == before
    assert mixed.gates.mode == mode
    assert torch.equal(mixed.gates.mask, mask)


class Placed(nn.Module):
    """A module that records the devices it is moved to."""

    def __init__(self):
        super().__init__()
        self.gates = type("Gates", (), {"mode": "masked"})()
        self.device, self.sent = torch.device("cpu"), []

    def to(self, device):
        self.device = device
        self.sent.append(device.type)
        return self


@pytest.mark.parametrize(("device", "there"), [(None, "cpu"), (torch.device("meta"), "meta")])
def test_it_is_on_the_device_meanwhile_and_back_afterwards(device, there):
    module = Placed()
    with at_rest(module, device):
        assert module.device.type == there
    assert module.sent == [there, "cpu"]
    with pytest.raises(RuntimeError, match="stopped"), at_rest(module, device):
        raise RuntimeError("stopped")
    assert module.device.type == "cpu"
    assert module.gates.mode == "masked"
    assert module.training


def test_batches_are_those_of_the_scoring_data_on_the_trainers_device(subject):
    assert subject.device == subject.trainer.strategy.root_device
    batches = list(subject.batches())
    assert [len(batch["labels"]) for batch in batches] == [5, 5, 2]
    for batch, expected in zip(batches, subject.data.score_dataloader(), strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize("rows", [1, 10, 1000])
def test_a_thinned_choice_is_the_same_however_many_processes_share_it(subject, monkeypatch, rows):
    def chosen(rank, world):
        monkeypatch.setattr(type(subject.data), "_place", lambda _: (rank, world))
        return sorted(tuple(row[row != 0].tolist()) for batch in subject.thinned(rows) for row in batch["input_ids"])

    alone = chosen(0, 1)
    assert len(alone) in range(1, rows + 1)
    assert len(alone) > rows // 2 or len(alone) == subject.data.score_places().stop
    assert sorted(chosen(0, 2) + chosen(1, 2)) == alone
    assert sorted(chosen(0, 3) + chosen(1, 3) + chosen(2, 3)) == alone
