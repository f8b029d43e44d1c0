"""Runs that are stopped at a chosen moment, each in a process of its own that has the libraries loaded already."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import training.comparison.run  # noqa: F401 (before processes are forked from the one that has imported this)
from training.commands.table import run_command

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])
LONGEST = 1800
"""Seconds for one run."""


@dataclass(frozen=True)
class Moment:
    """When a run is stopped: before a function's work, or after it.

    Args:
        function: as ``module:name`` or ``module:class.name``.
        call: which of its calls, from 1 on.
        after: whether its work is done.
    """

    function: str
    call: int = 1
    after: bool = False

    def stop_then(self, sign: int) -> None:
        """From now on, let the signal come at the moment."""
        module, _, name = self.function.partition(":")
        owner = importlib.import_module(module)
        *within, name = name.split(".")
        owner = functools.reduce(getattr, within, owner)
        work, calls = getattr(owner, name), [0]

        @functools.wraps(work)
        def stopping(*args, **more):
            calls[0] += 1
            if calls[0] != self.call:
                return work(*args, **more)
            if not self.after:
                os.kill(os.getpid(), sign)
            result = work(*args, **more)
            os.kill(os.getpid(), sign)
            return result

        setattr(owner, name, stopping)


def fit(
    arguments: list[str],
    folder: Path,
    moment: Moment | None = None,
    sign: int = signal.SIGKILL,
    *,
    file_size: int = resource.RLIM_INFINITY,
) -> tuple[int, str]:
    """Run ``fit`` in a folder and stop it at a moment; return its exit code (negative for a signal) and standard error.

    Args:
        file_size: The largest size of a file in bytes. The system refuses more, as on a full disk.
    """
    errors = folder / "stderr.txt"
    process = PROCESSES.Process(target=_fit, args=(arguments, folder, errors, moment, sign, file_size))
    process.start()
    process.join(LONGEST)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode, errors.read_text()


def _fit(arguments: list[str], folder: Path, errors: Path, moment: Moment | None, sign: int, file_size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    os.chdir(folder)
    os.environ.pop("WANDB_SERVICE", None)  # that of the tests' own process, which would outlive this one
    for number, path in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if moment is not None:
        moment.stop_then(sign)
    sys.exit(run_command("fit", arguments))
