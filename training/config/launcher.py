"""Where the experiments of a comparison are done: in this process, or on a cluster of Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gates.errors import GateError
from training.config.checks import at_least_1
from training.config.setup import Setup

AUTO = "auto"
"""The address of the cluster that runs on this machine."""


@dataclass(frozen=True)
class LauncherOptions:
    """Where experiments are done.

    Args:
        launcher: local for one after another in this process, or ray for several at a time on a cluster of Ray.
        ray_address: HOST:PORT of a cluster that this machine belongs to, or auto for the one that runs on it (default: one of
            this machine alone, for as long as the command runs).
        ray_cpus_per_task: processor cores, and threads, of each experiment.
        ray_gpus_per_task: GPUs of each experiment, such as 1, or 0.5 for two experiments on each (default: 1 where the cluster
            has any and --trainer.accelerator is not cpu, otherwise none).
    """

    launcher: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    ray_cpus_per_task: int = 1
    ray_gpus_per_task: int | float | None = None

    def __post_init__(self) -> None:
        at_least_1(self, "ray_cpus_per_task", prefix="--")
        gpus = self.ray_gpus_per_task
        if gpus is not None and not (0 <= gpus <= 1 or gpus == int(gpus) > 0):
            raise GateError(
                f"--ray_gpus_per_task is {gpus}; expected a share of one GPU, such as 0.5, or a whole number of them"
            )
        if self.ray_address not in (None, AUTO):
            self.host_and_port  # noqa: B018 (raises)

    @property
    def host_and_port(self) -> tuple[str, int]:
        """What the address says.

        Raises:
            GateError: if that is no host with a port.
        """
        host, _, port = (self.ray_address or "").rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise GateError(
                f"--ray_address is {self.ray_address!r}; expected HOST:PORT of a cluster that this machine belongs to, such as "
                "10.0.0.1:6379, or auto for the one that runs on it"
            )
        return host.strip("[]"), int(port)


def alone(setup: Setup) -> Setup:
    """The setup for experiments that are each done by one process.

    Raises:
        GateError: if several processes are asked for.
    """
    trainer = setup.trainer
    several = trainer.devices not in ("auto", 1, "1") and not (isinstance(trainer.devices, list) and len(trainer.devices) == 1)
    for name, asked in (("devices", several), ("num_nodes", trainer.num_nodes > 1), ("strategy", trainer.strategy != "auto")):
        if asked:
            raise GateError(
                f"--trainer.{name} is {getattr(trainer, name)}, but with --launcher ray one process does each experiment, and "
                "several experiments are done at a time; leave one of them away"
            )
    return replace(setup, trainer=replace(trainer, devices=1))
