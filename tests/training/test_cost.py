"""Peak memory and time on accelerators, by stand-ins that refuse what PyTorch refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.runs import make_data
from training.config.run import TrainerOptions
from training.runs.cost import measured
from training.setup import make_trainer


class Cuda:
    """Two GPUs, as much of ``torch.cuda`` as the project calls. No device has a peak before CUDA is initialised."""

    def __init__(self):
        self.calls, self.initialised, self.current = [], False, 0
        self.peaks = [3 * 2**20, 5 * 2**20]

    def init(self):
        self.initialised = True

    def reset_peak_memory_stats(self, device=None):
        if not self.initialised:
            raise RuntimeError("invalid argument to reset_peak_memory_stats")
        self.calls.append(("reset", self.index(device)))

    def max_memory_allocated(self, device=None):
        return self.peaks[self.index(device)] if self.initialised else 0

    def synchronize(self, device=None):
        self.init()
        self.calls.append(("synchronize", self.index(device)))

    def device(self, device):
        return _Current(self, self.index(device))

    def index(self, device):
        return self.current if device is None or device.index is None else device.index


class _Current:
    def __init__(self, cuda, index):
        self.cuda, self.index = cuda, index

    def __enter__(self):
        self.before, self.cuda.current = self.cuda.current, self.index

    def __exit__(self, *error):
        self.cuda.current = self.before


@pytest.fixture
def cuda(monkeypatch):
    found = Cuda()
    for name in ("init", "reset_peak_memory_stats", "max_memory_allocated", "synchronize", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_the_peak_of_a_gpu_is_measured_before_anything_has_used_it(cuda, device, index):
    with measured(torch.device(device), None) as meter:
        assert cuda.calls == [("reset", index)]
    assert meter.cost.peak_memory_mb == (3.0, 5.0)[index]
    assert cuda.calls == [("reset", index), ("synchronize", index)]


def test_auto_is_the_cpu_where_lightning_would_take_mps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr("pytorch_lightning.accelerators.mps.MPSAccelerator.is_available", lambda: True)
    setup: Any = SimpleNamespace(trainer=TrainerOptions(), weights=SimpleNamespace(average_last=1))
    assert make_trainer(setup).strategy.root_device == torch.device("cpu")


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda:1", True)])
def test_batches_are_pinned_for_a_gpu_alone(monkeypatch, device, pinned):
    """Pinning initialises CUDA, also on a machine whose GPU the run does not use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    data = make_data()
    assert data._split_loader("select", 4).pin_memory is False
    data.trainer = SimpleNamespace(
        global_rank=0, world_size=1, strategy=SimpleNamespace(root_device=torch.device(device)), lightning_module=None
    )
    assert data._split_loader("select", 4).pin_memory is pinned
