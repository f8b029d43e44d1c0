import errno
import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from training.cli.exit import PIPED_WIDTH, advised, finish, stdout


def ends(work, capsys):
    code = finish(lambda: "options", work, when_stopped="start again")
    return code, capsys.readouterr().err


def raising(error):
    def work(options):
        assert options == "options"
        raise error

    return work


def test_another_process_that_died_is_told_in_one_sentence(capsys):
    """As gloo and NCCL say it; what only sounds like it is not taken for it."""
    gloo = "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26770. GLHF!"
    said = "error: another process of this job died (Connection closed by peer), see the lines above; start again\n"
    assert ends(raising(RuntimeError(gloo)), capsys) == (2, said)
    nccl = "NCCL communicator was aborted on rank 0: remote process exited or there was a network error"
    assert "(remote process exited)" in ends(raising(RuntimeError(nccl)), capsys)[1]
    with pytest.raises(RuntimeError, match="shapes"):
        ends(raising(RuntimeError("shapes differ")), capsys)
    with pytest.raises(ValueError, match="gloo"):
        ends(raising(ValueError(gloo)), capsys)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(1)])  # Lightning makes the second of the first
def test_ctrl_c_says_how_to_go_on(capsys, stop):
    assert ends(raising(stop), capsys) == (130, "stopped; start again\n")


def test_tables_that_are_piped_are_not_cut(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stdout().width == PIPED_WIDTH
    stdout().print("x" * PIPED_WIDTH)
    assert capsys.readouterr().out == "x" * PIPED_WIDTH + "\n"
    monkeypatch.setenv("COLUMNS", "40")
    assert stdout().width == 40


def test_a_disk_that_is_full_is_told_with_the_file_and_what_to_do(capsys):
    full = OSError(errno.ENOSPC, "No space left on device", "run/metrics.csv")
    said = "error: 'run/metrics.csv' cannot be written: No space left on device; make room there, then: start again\n"
    assert ends(raising(full), capsys) == (2, said)

    def work(options):
        with advised(lambda: "go on with --existing resume"):
            raise full

    assert ends(work, capsys) == (2, said.replace("start again", "go on with --existing resume"))


def test_a_full_disk_is_known_by_whatever_library_finds_it(capsys):
    for error in (
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ):
        said = "error: something cannot be written: No space left on device; make room there, then: start again\n"
        assert ends(raising(error), capsys) == (2, said)


@pytest.mark.parametrize(
    ("number", "mended"),
    [
        (errno.ENOENT, "No such file or directory"),
        (errno.EROFS, "Read-only file system; give a place that can be written to"),
        (errno.EACCES, "Permission denied; see to its permissions, or give another place"),
    ],
)
def test_a_place_that_takes_no_files_is_told_with_what_to_do(number, mended, capsys):
    error = OSError(number, os.strerror(number), "run")
    assert ends(raising(error), capsys) == (2, f"error: 'run' cannot be read or written: {mended}\n")


def test_ctrl_c_is_not_lost_in_a_destructor(capsys):
    """Where Python ignores what is raised, as it does in the one that Lightning's profilers have."""

    class Trainer:
        def __init__(self):
            self.itself = self

        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    def work(options):
        Trainer()
        gc.collect()
        time.sleep(60)

    assert ends(work, capsys) == (130, "stopped; start again\n")


# -- standard output and error that nobody can write to --

NEEDS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
PRINTS = """
import sys
from training.cli.exit import finish
def work(options):
    for number in range(20000):
        print(number)
    with open(sys.argv[1], "w") as file:
        file.write("done")
    print("said", file=sys.stderr)
sys.exit(finish(lambda: None, work, when_stopped="again"))
"""


def ended(shell, tmp_path):
    """The exit code of work that prints much and then writes a file, what it said, and the file."""
    (tmp_path / "prints.py").write_text(PRINTS)
    file = tmp_path / "made.txt"
    command = f"{sys.executable} {tmp_path / 'prints.py'} {file} {shell}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    return done.returncode, done.stderr, file.read_text()


@pytest.mark.integration
@NEEDS_FULL
def test_a_full_disk_behind_standard_output_is_one_sentence_after_the_work(tmp_path):
    said = "said\nerror: standard output cannot be written: No space left on device\n"
    assert ended("> /dev/full", tmp_path) == (2, said, "done")


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["| head -1; exit ${PIPESTATUS[0]}", ">&-"])
def test_output_that_nobody_reads_is_no_mistake(shell, tmp_path):
    assert ended(shell, tmp_path) == (0, "said\n", "done")
