"""The processes of a sweep's trials: locked while they live, ended with their children, each with its share of the machine."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import torch

from gates.errors import GateError

GRACE = 15.0
"""Seconds that a trial has to end after Ctrl+C."""


@contextmanager
def locked(path: Path) -> Iterator[TextIO]:
    """A file that no other process can lock while this one, or a child that was handed the file, has it open.

    Raises:
        GateError: if one has it.
    """
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GateError(f"another process is at work ({str(path)!r} is locked); wait for it or end it") from error
        file.truncate(0)
        yield file


def end_orphan(lock: Path) -> None:
    """End the process of a trial that outlived a sweep killed with SIGKILL.

    Raises:
        GateError: if it does not end.
    """
    for sent in (None, signal.SIGINT, signal.SIGKILL):
        if sent is not None:  # the file is locked, so its process lives and the number in it is that process's own
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(lock.read_text(encoding="utf-8")), sent)
        deadline = time.monotonic() + (0 if sent is None else GRACE)
        while True:
            try:
                with locked(lock):
                    return
            except GateError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)
    with locked(lock):
        return


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ctrl+C for processes and their children; SIGKILL for those that do not end soon, or at another Ctrl+C."""
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
    """Environment of a trial: its share of the cores unless OMP_NUM_THREADS says otherwise, and one GPU of several."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} | os.environ
    gpus = torch.cuda.device_count()
    if jobs > 1 and gpus > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        environment["CUDA_VISIBLE_DEVICES"] = visible[slot % gpus]
    return environment


def last_error(log: Path, returncode: int) -> str:
    """Why a trial failed: the last line that begins with ``error:``, or the last line, or the signal that ended it."""
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [f"exit code {returncode}"])[-1].removeprefix("error:").strip()[:500]
