"""Runs where nothing but the run's own directory can be written to: no home, no caches, no current directory."""

import os
import subprocess
import sys

import pytest

from tests.training.runs import write_config

NOWHERE = "/proc/nonexistent"
PROC = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a directory that nobody can write to")
WITHOUT_TEMPORARY_FILES = """
import sys, tempfile
tempfile._candidate_tempdir_list = lambda: ["/proc/nonexistent"]
from training.fit import main
sys.exit(main())
"""


def fit(*arguments, start=("-m", "training.fit"), cwd="/proc"):
    """Run a fit in a process whose environment names no place that can be written to."""
    names = ("HOME", "TMPDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME")
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
    environment = {**kept, **dict.fromkeys(names, NOWHERE), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, env=environment, cwd=cwd)


@pytest.mark.integration
@PROC
@pytest.mark.parametrize(
    ("start", "run", "message"),
    [
        (("-m", "training.fit"), "/proc/nonexistent/run", "error: '/proc/nonexistent' cannot be read or written: "),
        (("-c", WITHOUT_TEMPORARY_FILES), "run", "error: no temporary files can be written (No usable"),
    ],
)
def test_what_cannot_be_written_is_one_sentence_before_training(tmp_path, start, run, message):
    done = fit("--config", write_config(tmp_path), "--run_dir", run, start=start)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(message)  # after what matplotlib says of its cache
    assert "Traceback" not in done.stderr
