"""The connection to a cluster of Ray. Ray is an extra, so it is imported where it is used."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gates.errors import GateError, first_line
from training.config.comparison import AUTO, LauncherOptions

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_NUM_REDIS_GET_RETRIES": "5",  # seconds for an answer from the address
}
"""Environment variables that Ray reads when it is imported. A user's own stay."""
ON_GPUS = ("auto", "gpu", "cuda")
"""Accelerators of a trainer that use the GPUs of the cluster."""


def check_ray(options: LauncherOptions) -> None:
    """Raise :class:`GateError` if Ray is not installed, or its address does not answer."""
    if importlib.util.find_spec("ray") is None:
        raise GateError("--launcher ray needs Ray, which is not installed; run pip install ray")
    if options.ray_address in (None, AUTO):
        return
    try:
        socket.create_connection(options.host_and_port, timeout=5.0).close()
    except OSError as error:
        raise unreachable(options, error) from error


def unreachable(options: LauncherOptions, error: Exception) -> GateError:
    if options.ray_address is None:
        return GateError(f"Ray does not start on this machine: {first_line(error)}; remove --launcher ray")
    if options.ray_address == AUTO:
        return GateError(
            "--ray_address is auto, but no cluster of Ray runs on this machine; start one by ray start --head, or remove "
            "--ray_address for a cluster of this command alone"
        )
    return GateError(
        f"there is no cluster of Ray at --ray_address {options.ray_address}: {first_line(error)}; start one by ray start "
        "--head and give its address, or remove --ray_address for a cluster of this machine alone"
    )


@contextmanager
def connected(options: LauncherOptions, accelerator: str) -> Iterator[None]:
    """Connect to a cluster for a ``with`` block: the one at the address, or one of this machine, which ends with the block."""
    check_ray(options)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    terminated = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=options.ray_address or "local",
            include_dashboard=None if options.ray_address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, TimeoutError, ValueError, OSError) as error:
        raise unreachable(options, error) from error
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminated)  # Ray's own handler ends without a message
        gpus_per_task(options, accelerator)  # raises
        yield
    finally:
        ray.shutdown()


def gpus_per_task(options: LauncherOptions, accelerator: str) -> float:
    """Return the number of GPUs of each task on the connected cluster."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, gpus = (max((machine.get(kind, 0.0) for machine in machines), default=0.0) for kind in ("CPU", "GPU"))
    if options.ray_cpus_per_task > cores:
        raise GateError(
            f"--ray_cpus_per_task is {options.ray_cpus_per_task}, but no machine of the cluster has more than {cores:g} "
            "processor cores; give at most that"
        )
    wanted = options.ray_gpus_per_task
    if wanted is None:
        wanted = 1.0 if (gpus > 0 and accelerator in ON_GPUS) or accelerator in ON_GPUS[1:] else 0.0
    if wanted > gpus:
        raise GateError(
            f"each experiment is to have {wanted:g} GPUs, but no machine of the cluster has more than {gpus:g}; see "
            "--ray_gpus_per_task and --trainer.accelerator"
        )
    if wanted > 0 and accelerator not in ON_GPUS:
        raise GateError(
            f"--ray_gpus_per_task is {wanted:g}, but --trainer.accelerator {accelerator} uses none; remove one of them"
        )
    if wanted == 0 and accelerator in ON_GPUS[1:]:
        raise GateError(f"--ray_gpus_per_task is 0, but --trainer.accelerator {accelerator} needs one; remove one of them")
    return float(wanted)
