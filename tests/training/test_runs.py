"""A shared run that fails is one failure, whatever else needs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import shared_folder


def test_a_shared_run_that_failed_is_one_failure(tmp_path_factory, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(tmp_path_factory, "_basetemp", tmp_path_factory.mktemp("base"))
    made = []

    def make(folder):
        made.append(folder)
        (folder / "half").touch()
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        shared_folder(tmp_path_factory, "shared", make)
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match=r"the shared run 'shared' failed, see the error of .*test_runs.py"):
            shared_folder(tmp_path_factory, "shared", make)
    assert len(made) == 1


def test_what_a_killed_worker_left_of_a_shared_run_is_made_again(tmp_path_factory, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(tmp_path_factory, "_basetemp", tmp_path_factory.mktemp("base"))
    (tmp_path_factory.getbasetemp() / "shared").mkdir()
    folder = shared_folder(tmp_path_factory, "shared", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert shared_folder(tmp_path_factory, "shared", pytest.fail) == folder


THREE_TESTS = """
import pytest

@pytest.fixture(scope="module")
def shared():
    raise RuntimeError("no disk")

def test_one(shared): pass
def test_two(shared): pass
def test_three(): pass
"""


def test_a_fixture_that_fails_is_one_error(tmp_path):
    (tmp_path / "test_three.py").write_text(THREE_TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_setup\n")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "1 passed, 1 skipped" in done.stdout
    assert "1 error" in done.stdout
    assert "it needs what failed for test_three.py::test_one" in done.stdout
