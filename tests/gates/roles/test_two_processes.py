"""Roles found by two processes that really talk to each other, each with its share of the sentences, and by one."""

import dataclasses

import pytest
import torch

from tests.gates.roles.built import Measured, built_model, sentences

NAMES = ("strength", "low", "high", "baseline", "p")
FIRST_SHARE = 70
"""Sentences of the first process; the other has the rest, so that shares are not equal."""


def found(measured):
    """Names of the roles of every head, and the numbers behind them, ``[roles, numbers, heads]``."""
    roles = measured.roles()
    return measured.named(), torch.stack([torch.stack([getattr(role, name) for name in NAMES]) for role in roles])


def _in_one_of_two(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    texts, rows = sentences(), slice(FIRST_SHARE, None) if rank else slice(FIRST_SHARE)
    share = dataclasses.replace(texts, **{name: values[rows] for name, values in vars(texts).items()})
    torch.save(found(Measured(built_model()).read(share, first=FIRST_SHARE * rank)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_find_the_roles_that_one_finds(tmp_path):
    torch.multiprocessing.spawn(_in_one_of_two, args=(str(tmp_path),), nprocs=2)
    names, numbers = found(Measured(built_model()).read(sentences()))
    for rank in range(2):
        own_names, own_numbers = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert own_names == names == [["positional"], ["syntactic"], ["rare"], ["broad"]]
        torch.testing.assert_close(own_numbers, numbers, equal_nan=True, rtol=1e-6, atol=1e-9)
