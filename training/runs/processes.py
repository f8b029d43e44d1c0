"""The processes that train together: the first one decides and writes, and the others learn the result.

Lightning starts the others when a trainer first trains or evaluates. Until then, and on one device, there is one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import distributed

from gates.errors import GateError
from training.runs.launched import World

T = TypeVar("T")


def start(trainer: pl.Trainer) -> None:
    """Start a trainer's other processes now, so that the first process can decide for all of them."""
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return
    if world_size() > 1:
        wait_for_all()
        return
    if strategy.launcher is None:
        strategy.setup_environment()
    elif isinstance(strategy.launcher, _SubprocessScriptLauncher):
        strategy.launcher.launch(strategy.setup_environment)
    else:
        raise GateError(
            f"--trainer.strategy starts new processes for every training ({type(strategy.launcher).__name__}), but a "
            "comparison needs some that stay; use --trainer.strategy ddp"
        )


class Tasks(SLURMEnvironment):
    """SLURM's tasks, by whatever option of SLURM they were requested. The trainer's devices follow them."""

    @staticmethod
    def _validate_srun_variables() -> None:
        pass  # --ntasks instead of --ntasks-per-node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        pass


def environment_of(world: World | None) -> ClusterEnvironment:
    """Return Lightning's view of the processes that a launcher started; it starts its own if none did."""
    if world is None or world.size == 1:
        return LightningEnvironment()
    if world.launcher == "srun":
        return Tasks()
    return TorchElasticEnvironment() if "LOCAL_RANK" in os.environ else KubeflowEnvironment()


def world_size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Return the number of this process."""
    return 0 if world_size() == 1 else distributed.get_rank()


def is_first() -> bool:
    """Return whether this is the process that decides and writes."""
    return rank() == 0


def in_first(work: Callable[[], T]) -> T:
    """Return the result of work that the first process does, in all processes.

    Raises:
        GateError: In the others, if the work raises anything in the first, so that none of them waits in vain.
    """
    if world_size() == 1:
        return work()
    sent: list[Any] = [None, None]  # the result, or the message of an error
    failure: Exception | None = None
    if is_first():
        try:
            sent[0] = work()
        except Exception as error:
            failure, sent[1] = error, str(error)
    distributed.broadcast_object_list(sent, src=0)
    if sent[1] is not None:
        raise failure or GateError(sent[1])
    return sent[0]


def check_agree(value: object, what: str) -> None:
    """Raise :class:`GateError` in all processes if they were given different values."""
    if len(set(map(str, gathered(value)))) > 1:
        raise GateError(f"the processes of this job were given different {what}; give all of them the same")


def wait_for_all() -> None:
    """Wait until all processes have come here."""
    if world_size() > 1:
        distributed.barrier()


def gathered(value: T) -> list[T]:
    """Return the values of all processes in their order, in all of them."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, value)
    return found


def share_of_batch(weight: float, device: torch.device) -> float:
    """Return the factor of this process's batch with which DDP's mean of gradients is that of one process with all batches.

    Args:
        weight: The weight of the batch, such as its number of examples or tokens.
    """
    if world_size() == 1:
        return 1.0
    own = torch.tensor(float(weight), device=device)
    total = own.clone()
    distributed.all_reduce(total)
    return float(own * world_size() / total)
