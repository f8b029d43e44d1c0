"""Generators are as they were after a check, on the CPU and on stand-ins for the devices of a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gates.attention.inputs import example_inputs
from gates.attention.modes import kept_generators
from gates.surgery.remove import remove_heads_
from gates.surgery.verify import relative_difference
from tests.models import build, inputs


class OnDevices(nn.Module):
    """A model that says it has a parameter on each device."""

    def __init__(self, *devices):
        super().__init__()
        self.devices = devices

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device(device)) for device in self.devices])


@pytest.fixture
def cuda(monkeypatch):
    """Two GPUs whose generators exist once CUDA is initialised, as PyTorch has it; the calls so far."""
    generators = tuple(torch.Generator().manual_seed(number) for number in (11, 12))
    called = []

    def init():
        called.append("init")
        monkeypatch.setattr(torch.cuda, "default_generators", generators)

    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: called.append("every device is seeded"))
    return generators, called


@pytest.mark.parametrize(("device", "used"), [("cuda:1", 1), ("cuda", 0)])
def test_the_generator_of_the_models_device_is_kept_and_no_other_touched(cuda, device, used):
    generators, called = cuda
    before = [generator.get_state() for generator in generators]
    draws = []
    for _ in range(2):
        with kept_generators(OnDevices("cpu", device), seed=3):
            assert torch.equal(generators[1 - used].get_state(), before[1 - used])
            draws.append(torch.cat([torch.rand(2), torch.rand(2, generator=generators[used])]))
    assert torch.equal(*draws)
    assert all(torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True))
    assert "every device is seeded" not in called


def test_a_model_on_the_cpu_leaves_a_gpu_uninitialised_and_unseeded(cuda):
    _, called = cuda
    model, batch = build("bert").eval(), inputs("bert")
    state = torch.get_rng_state()
    called.clear()
    relative_difference(model, model, batch)
    example_inputs(model)
    assert torch.equal(torch.get_rng_state(), state)
    remove_heads_(model, torch.tensor([1.0] + [0.0] * 7))
    assert called == []


def test_generators_are_restored_after_an_error():
    model, state = nn.Linear(1, 1), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size"), kept_generators(model, seed=1):
        torch.rand(2) + torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
