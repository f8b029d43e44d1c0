"""vLLM in a process of another interpreter, since it wants other versions than this project has."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

import torch

from gates.errors import GateError
from training.coverage import in_vllm

Backend = Literal["auto", "transformers"]


class RefusedError(Exception):
    """What vLLM says of a model that it does not run."""


class Vllm:
    """What is asked of vLLM.

    Args:
        process: runs :mod:`training.coverage.in_vllm`; None if there is none.
        said: what the process writes to standard error.

    Attributes:
        missing: why nothing can be asked; empty where it can.
        versions: of vLLM and of what it stands on.
    """

    def __init__(self, process: subprocess.Popen[str] | None, said: IO[str] | None = None) -> None:
        self._process, self._said = process, said
        greeting: dict[str, Any] = {"error": "no --vllm_python"} if process is None else self._next()
        self.missing: str = greeting.get("error", "")
        self.versions: dict[str, str] = greeting.get("versions", {})

    def ask(self, **request: Any) -> Mapping[str, Any]:
        """The answer to a request of :mod:`training.coverage.in_vllm`.

        Raises:
            RefusedError: with vLLM's message.
        """
        assert self._process is not None, self.missing
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # the process has ended, and what it said last is the answer
            with suppress(OSError):
                self._process.stdin.close()
        answer = self._next()
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    def _next(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._said is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._said.seek(0)
        return {"error": (self._said.read().strip() or "its process ended without a word").splitlines()[-1]}


@contextmanager
def opened(python: str | None) -> Iterator[Vllm]:
    """vLLM of an interpreter, if one is given, until the block ends."""
    if python is None:
        yield Vllm(None)
        return
    line = [python, "-P", in_vllm.__file__]  # whose folder has modules with names of others
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(line, **pipes, stderr=said, env={**os.environ, **threads}) as one,
    ):
        yield Vllm(one, said)


@contextmanager
def loaded(vllm: Vllm, folder: Path, backend: Backend) -> Iterator[str]:
    """The name of an export in vLLM, until the block ends.

    Raises:
        RefusedError: if vLLM does not load it.
    """
    name = f"{folder} {backend}"
    try:
        vllm.ask(load=name, folder=str(folder), backend=backend)
        yield name
    finally:
        with suppress(RefusedError):  # of a process that has ended
            vllm.ask(end=name)


def check_python(python: str | None) -> None:
    """Whether this is an interpreter that can run :mod:`training.coverage.in_vllm`.

    Raises:
        GateError: if it is not.
    """
    if python is None:
        return
    line = [python, "-P", "-c", "print(1 + 1)"]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        runs = done.stdout.strip() == "2"
    except (OSError, ValueError):  # no program, or one that writes no text
        runs = False
    if not runs:
        raise GateError(
            f"--vllm_python is {python!r}, which does not run as Python 3.11 or later; give that of an environment with vLLM"
        )
