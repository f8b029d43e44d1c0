"""How a campaign of faults is held: commands in this process, what became of each, and the table of all.

Every case ends in one of five ways. It *survived* if the result is the one of the undamaged files, or it is a *clear error* if
one sentence names what is wrong and the exit code is 2. A *traceback*, another result without a word (*silent*) and a *hang*
are defects. A sentence that does not say which file is meant counts as a traceback.
"""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import training.commands.export
import training.commands.summary
import training.runs.directory
from gates.errors import GateError
from tests.training.stops import LONGEST as LONGEST_PROCESS
from tests.training.stops import PROCESSES
from training.commands.table import run_command

PROCESSES.set_forkserver_preload(["tests.training.stops", __name__])

SURVIVED, CLEAR, TRACEBACK, SILENT, HANG = "survived", "clear error", "traceback", "silent", "hang"
OUTCOMES = (SURVIVED, CLEAR, TRACEBACK, SILENT, HANG)
LONGEST = 1200
"""Seconds for one case in this process."""
TIMES = int(os.environ.get("HEAD_GATES_CAMPAIGN", "1"))
"""How many times as many cases: more of the random ones, and every other one with other chances."""
SEED = int(os.environ.get("HEAD_GATES_CAMPAIGN_SEED", "0"))


class Hang(BaseException):
    """A case takes too long."""


@dataclass(frozen=True)
class Ended:
    """How a case in this process ended.

    Args:
        code: exit code of the command; None if it raised, or did not end.
        out, err: what it printed.
        raised: the traceback, if there is one.
    """

    code: int | None
    out: str = ""
    err: str = ""
    raised: str = ""
    hangs: bool = False

    def outcome(self, right: Callable[[], bool], named: Sequence[str] = ()) -> str:
        """What became of the case.

        Args:
            right: whether the result is the one of undamaged files.
            named: of which a clear error names one.
        """
        if self.hangs:
            return HANG
        if self.code == 0:
            return SURVIVED if right() else SILENT
        lines = self.err.strip().splitlines()
        said = bool(lines) and "Traceback" not in self.err
        is_sentence = self.code == 2 and said and [line for line in lines if line.startswith("error: ")] == lines[-1:]
        if is_sentence and (not named or any(name in lines[-1] for name in named)):
            return CLEAR
        return TRACEBACK


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises :class:`Hang` in a ``with`` block that takes longer."""

    def late(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def held(work: Callable[[], int | None], seconds: float = LONGEST) -> Ended:
    """Do some work in this process; a :class:`GateError` of the library counts as the sentence that a command makes of it."""
    out, err = io.StringIO(), io.StringIO()
    code, raised, hangs = None, "", False
    try:
        with redirect_stdout(out), redirect_stderr(err), limited(seconds):
            code = work() or 0
    except GateError as error:
        code = 2
        err.write(f"error: {error}\n")
    except Hang:
        hangs = True
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        raised = traceback.format_exc()
    return Ended(code, out.getvalue(), err.getvalue(), raised, hangs)


@dataclass
class Tally:
    """Counts of a campaign by class of fault, and what its defects were."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)

    def add(self, fault: str, outcome: str, case: str, ended: Ended | None = None) -> None:
        """Count a case, whose defect is kept with what was said."""
        self.counts.setdefault(fault, Counter())[outcome] += 1
        if outcome not in (SURVIVED, CLEAR):
            said = "" if ended is None else f"\n    {ended.raised[-1500:] or ended.err[-500:] or ended.out[-300:]}"
            self.defects.append(f"{fault}, {case}: {outcome}{said}")

    def table(self) -> str:
        """Class of fault, cases, and how they ended, in Markdown."""
        rows = [("class of fault", "cases", *OUTCOMES)]
        for fault, counts in self.counts.items():
            rows.append((fault, str(sum(counts.values())), *(str(counts[outcome]) for outcome in OUTCOMES)))
        sums = [sum(counts[outcome] for counts in self.counts.values()) for outcome in OUTCOMES]
        rows.append(("all", str(sum(sums)), *map(str, sums)))
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], f"| --- |{' ---: |' * (len(rows[0]) - 1)}", *lines[1:]]) + "\n"


def chances(*name: object) -> random.Random:
    """A source of chance for one case, the same in every run with a seed."""
    return random.Random(f"{SEED} {' '.join(map(str, name))}")


def files_of(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, by name, without what is hidden."""
    within = ((path, path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(name): path.read_bytes() for path, name in within if not any(part.startswith(".") for part in name.parts)}


WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")


def _work(command, folder, kill_at):
    """A command in a process that is killed before its so manyth change to the folder; 0 for none."""
    os.chdir(folder)
    for number, path in ((1, os.devnull), (2, folder / f"stderr-{os.getpid()}.txt")):
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
    sys.__stderr__.write(f"{ended.code}\n{ended.err}{ended.raised}")
    sys.__stderr__.flush()
    os._exit(0)


def in_a_process(folder, command, *, kill_at=0):
    """How a command ends in a process of its own; None if it was killed."""
    process = PROCESSES.Process(target=_work, args=(command, folder, kill_at))
    process.start()
    process.join(LONGEST_PROCESS)
    if process.exitcode is None:
        process.kill()
        return Ended(None, hangs=True)
    said = folder / f"stderr-{process.pid}.txt"
    code, _, rest = said.read_text().partition("\n") if said.exists() else ("", "", "")
    said.unlink(missing_ok=True)
    if process.exitcode < 0:
        return None
    raised = rest if code == "None" else ""
    return Ended(None if raised else int(code), err=rest, raised=raised)
