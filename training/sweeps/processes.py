"""The processes of a sweep's trials: their share of the machine, their end, and the reason of a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

GRACE = 15.0
"""The seconds that a trial has to end after Ctrl+C."""


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send Ctrl+C to processes and their children, and SIGKILL to those that do not end soon, or at another Ctrl+C."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        os.killpg(process.pid, signal.SIGINT)
    deadline = time.monotonic() + GRACE
    try:
        for process in alive:
            process.wait(max(0.0, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass
    finally:
        for process in alive:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def trial_environment(jobs: int, slot: int) -> dict[str, str]:
    """Return the environment of a trial: its share of the cores, unless OMP_NUM_THREADS is set, and one GPU of several."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} | os.environ
    gpus = torch.cuda.device_count()
    if jobs > 1 and gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[slot % gpus]
    return environment


def last_error(log: Path, returncode: int) -> str:
    """Return why a trial failed: the last line that begins with ``error:``, the last line, or the signal that ended it."""
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [f"exit code {returncode}"])[-1].removeprefix("error:").strip()[:500]
