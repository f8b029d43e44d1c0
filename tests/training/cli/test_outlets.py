"""Standard output and error that nobody can write to."""

import os
import subprocess
import sys

import pytest

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
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
@FULL
def test_a_full_disk_behind_standard_output_is_one_sentence_after_the_work(tmp_path):
    said = "said\nerror: standard output cannot be written: No space left on device\n"
    assert ended("> /dev/full", tmp_path) == (2, said, "done")


@pytest.mark.integration
@pytest.mark.parametrize("shell", ["| head -1; exit ${PIPESTATUS[0]}", ">&-"])
def test_output_that_nobody_reads_is_no_mistake(shell, tmp_path):
    assert ended(shell, tmp_path) == (0, "said\n", "done")
