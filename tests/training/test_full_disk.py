"""A disk that gets full during a run: one sentence, nothing under a final name that is not whole, and it goes on."""

import ctypes
import errno
import os
import re
import resource
import sys
import traceback

import pandas as pd
import pytest
import torch

from tests.training.runs import write_config
from tests.training.stops import LONGEST, PROCESSES
from training.commands.table import run_command

SMALL = ["--data.train_rows", "96", "--data.select_rows", "32", "--data.test_rows", "32", "--data.score_rows", "32"]
COMPARED = ["--compare", "posthoc", "--curve", "[0.5]"]
MEASURED = ["seconds", "peak_memory_mb"]
NEW_NAMESPACE, BELOW_TOO, PRIVATE, AGAIN = 0x20000, 0x4000, 0x40000, 0x20
"""Of unshare(2) and mount(2)."""
SYSTEM = ctypes.CDLL(None, use_errno=True)


def arguments(folder):
    return ["--config", write_config(folder), *SMALL, *COMPARED, "--run_dir", "run"]


def in_a_process(work, *given):
    """The exit code of some work in a process of its own that has the libraries loaded already."""
    process = PROCESSES.Process(target=work, args=given)
    process.start()
    process.join(2 * LONGEST)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def said_by(run, errors):
    """The exit code of a command and what it says; of a traceback too."""
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            code = run()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
    return code, errors.read_text()


def whole(run):
    """Whether every file under a final name can be read."""
    for path in run.rglob("*"):
        within = path.relative_to(run)
        if not path.is_file() or any(part.startswith(".") for part in within.parts):
            continue
        if path.suffix == ".ckpt":
            torch.load(path, weights_only=True)
        elif path.suffix == ".csv" and path.name != "metrics.csv":  # which is written line by line
            assert path.read_text().endswith("\n"), within
        elif path.suffix in (".json", ".yaml") and path.name != "hparams.yaml":  # Lightning's, which nobody reads
            assert path.read_text().endswith(("\n", "}")), within
    return True


def full_then_not(folder, given, size, outcome):
    """The same in a process with a disk of its own, of so many KiB; then there is room, and the run goes on."""
    assert SYSTEM.unshare(NEW_NAMESPACE) == 0
    SYSTEM.mount(b"none", b"/", None, BELOW_TOO | PRIVATE, None)
    disk = folder / "disk"
    disk.mkdir()
    assert SYSTEM.mount(b"tmpfs", bytes(disk), b"tmpfs", 0, f"size={size}k".encode()) == 0
    os.chdir(disk)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    code, said = said_by(lambda: run_command("fit", given), folder / "stderr.txt")
    assert (code, said.count("\n")) == (2, 1), said
    assert said.startswith("error: 'run"), said
    assert f"cannot be written: {os.strerror(errno.ENOSPC)}; make room there, then: " in said
    advised = said.strip().endswith("go on with --existing resume")
    assert advised or said.strip().endswith("nothing was written; start again"), said
    assert whole(disk / "run")
    assert SYSTEM.mount(b"tmpfs", bytes(disk), b"tmpfs", AGAIN, b"size=64m") == 0
    more = ["--existing", "resume"] if advised else []
    code, said = said_by(lambda: run_command("fit", [*given, *more]), folder / "stderr.txt")
    assert (code, said) == (0, ""), said
    outcome.write_text((disk / "run" / "comparison.csv").read_text())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert in_a_process(run_in, folder, arguments(folder)) == 0
    return pd.read_csv(folder / "run" / "comparison.csv").drop(columns=MEASURED)


def run_in(folder, given):
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(run_command("fit", given))


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount a disk")
@pytest.mark.parametrize("size", [330])
def test_a_run_on_a_full_disk_ends_with_a_sentence_and_goes_on(size, unbroken, tmp_path):
    outcome = tmp_path / "comparison.csv"
    assert in_a_process(full_then_not, tmp_path, arguments(tmp_path), size, outcome) == 0
    pd.testing.assert_frame_equal(pd.read_csv(outcome).drop(columns=MEASURED), unbroken, check_exact=True)


def limited(folder, given, size):
    """A run in a process whose files may have so many bytes."""
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    code, _ = said_by(lambda: run_command("fit", given), folder / "stderr.txt")
    sys.exit(code)


@pytest.mark.integration
def test_a_checkpoint_that_is_too_large_for_its_place_is_named(tmp_path):
    """The same for everybody: the system says it where the limit is one of the process."""
    assert in_a_process(limited, tmp_path, arguments(tmp_path), 60_000) == 2
    assert re.fullmatch(
        r"error: 'run/experiments/\.[0-9a-f]+/weights\.ckpt' cannot be written: File too large; make room there, then: "
        r"go on with --existing resume\n",
        (tmp_path / "stderr.txt").read_text(),
    )
    assert list((tmp_path / "run").rglob("*.ckpt")) == []
    assert whole(tmp_path / "run")
