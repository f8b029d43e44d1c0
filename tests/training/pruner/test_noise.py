"""The random numbers of a step."""

import pytest
import torch

from gates.gating.head_gates import HeadGates
from tests.models import build
from training.pruner.module import noise_of, seed_step_


class Module:
    def __init__(self, seed):
        self.seed = seed


def noise(gates, seed, batch=0, rank=0):
    seed_step_(gates, seed=seed, batch=batch, rank=rank, device=torch.device("cpu"))
    return torch.rand(8, generator=gates.generator)


def test_noise_is_a_function_of_seed_batch_and_process():
    gates = HeadGates(build("bert"), draw_per="example")
    first = noise(gates, 0)
    assert torch.equal(first, noise(gates, 0))
    others = [noise(gates, 1), noise(gates, 0, batch=1), noise(gates, 0, rank=1)]
    assert not any(torch.equal(first, other) for other in others)


def test_one_draw_for_a_batch_is_the_same_in_all_processes():
    gates = HeadGates(build("bert"), draw_per="batch")
    assert torch.equal(noise(gates, 0), noise(gates, 0, rank=1))


def test_each_restart_has_other_noise_and_the_first_that_of_the_seed():
    gates, module = HeadGates(build("bert")), Module(3)
    drawn = []
    for restart in (0, 1, 2):
        with noise_of(module, restart):
            drawn.append(noise(gates, module.seed))
    assert torch.equal(drawn[0], noise(gates, 3))
    assert len({tuple(draw.tolist()) for draw in drawn}) == 3


def test_the_seed_is_as_before_also_behind_an_error():
    module = Module(3)
    with pytest.raises(RuntimeError), noise_of(module, 2):
        raise RuntimeError
    assert module.seed == 3
