"""Run and judge the cases of the fault campaign.

A case is in order if its result is that of undamaged files, or if one sentence with exit code 2 names the damaged file.
A traceback, another result without an error, and a hang are defects.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import training.commands.export
import training.commands.summary
import training.runs.directory
from gates.errors import GateError
from tests.training.stops import LONGEST as LONGEST_PROCESS
from tests.training.stops import PROCESSES
from training.commands.table import run_command

PROCESSES.set_forkserver_preload(["tests.training.stops", __name__])
LONGEST = 1200
"""Seconds for one case in this process."""
TIMES = int(os.environ.get("HEAD_GATES_CAMPAIGN", "1"))
"""The factor on the number of drawn cases."""
SEED = int(os.environ.get("HEAD_GATES_CAMPAIGN_SEED", "0"))


@dataclass(frozen=True)
class Ended:
    """The end of a case: the exit code, None if it raised or hangs, and what it printed."""

    code: int | None
    out: str = ""
    err: str = ""

    def defect(self, right: Callable[[], bool], named: Sequence[str] = ()) -> str:
        """Return what is wrong, or an empty text.

        Args:
            right: A function that compares the result with that of undamaged files.
            named: The names of which an error has to contain one.
        """
        if self.code == 0:
            return "" if right() else f"another result without an error: {self.out[-300:]}"
        lines = self.err.strip().splitlines()
        is_sentence = self.code == 2 and lines and [line for line in lines if line.startswith("error: ")] == lines[-1:]
        if is_sentence and "Traceback" not in self.err and (not named or any(name in lines[-1] for name in named)):
            return ""
        return f"exit code {self.code}: {self.err[-1500:]}"


class Hang(BaseException):
    """A case takes too long."""


def held(work: Callable[[], int | None], seconds: float = LONGEST) -> Ended:
    """Do some work in this process. A :class:`GateError` of the library counts as the sentence that a command makes of it."""

    def late(*_: object) -> None:
        raise Hang

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    code = None
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = work() or 0
    except GateError as error:
        code = 2
        err.write(f"error: {error}\n")
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        err.write(traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return Ended(code, out.getvalue(), err.getvalue())


def chances(*name: object) -> random.Random:
    """Return a source of chance for one case, the same in every run with a seed."""
    return random.Random(f"{SEED} {' '.join(map(str, name))}")


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder by name, without hidden ones."""
    within = ((path, path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(name): path.read_bytes() for path, name in within if not any(part.startswith(".") for part in name.parts)}


WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")


def _work(command, folder, errors, kill_at):
    os.chdir(folder)
    for number, path in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    training.runs.directory.WAIT = 0.2
    changes = [0]

    def count(event, arguments):
        if event not in WRITES or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if str(Path(arguments[0]).absolute()).startswith(str(folder)):
            changes[0] += 1
            if changes[0] == kill_at:
                os.kill(os.getpid(), 9)

    if kill_at:
        sys.addaudithook(count)
    ended = held(lambda: run_command(command[0], command[1:]), LONGEST)
    sys.__stderr__.write(ended.err)
    sys.__stderr__.flush()
    os._exit(1 if ended.code is None else ended.code)


def in_a_process(folder, command, *, kill_at=0):
    """Return how a command ends in a process of its own; None if it was killed before this change to the folder."""
    errors = folder / "stderr.txt"
    process = PROCESSES.Process(target=_work, args=(command, folder, errors, kill_at))
    process.start()
    process.join(LONGEST_PROCESS)
    if process.exitcode is None:
        process.kill()
        return Ended(None, err="it hangs")
    return None if process.exitcode < 0 else Ended(process.exitcode, err=errors.read_text())
