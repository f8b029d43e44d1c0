"""A shared run that fails is one failure, whatever else needs it."""

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
