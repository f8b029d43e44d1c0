"""Experiments on disk: made once, whole or not there."""

import json
import multiprocessing
import os
import signal
import time

import pytest
import torch

from gates.errors import GateError
from training.comparison.cache import ExperimentCache, key_of


def test_equal_content_has_equal_keys_and_other_content_another():
    assert key_of({"a": 1, "b": [0.5]}) == key_of({"b": [0.5], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})


def test_an_experiment_is_made_once(tmp_path):
    cache, calls = ExperimentCache(tmp_path), []

    def make(folder):
        calls.append(folder)
        (folder / "file.txt").write_text("beside the result")
        return {"value": 3}

    first = cache.get_or_make({"x": 1}, make)
    second = ExperimentCache(tmp_path).get_or_make({"x": 1}, make)
    assert len(calls) == 1
    assert first == second
    assert second.result == {"value": 3}
    assert (second.path / "file.txt").read_text() == "beside the result"
    assert json.loads((second.path / "experiment.json").read_text()) == {"x": 1}


def test_work_that_fails_leaves_no_experiment(tmp_path):
    cache = ExperimentCache(tmp_path)

    def fail(folder):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache.get_or_make({"x": 1}, fail)
    assert cache.get({"x": 1}) is None


def forked(work, *arguments):
    """A process of its own that does some work; a fork has all modules at once."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def test_killed_work_finds_its_files_again(tmp_path):
    cache = ExperimentCache(tmp_path)

    def make(folder):
        (folder / "last.ckpt").write_text("half way")
        os.kill(os.getpid(), signal.SIGKILL)

    process = forked(cache.get_or_make, {"x": 1}, make)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert cache.get({"x": 1}) is None
    found = cache.get_or_make({"x": 1}, lambda folder: {"found": (folder / "last.ckpt").read_text()})
    assert found.result == {"found": "half way"}


def test_of_two_processes_one_makes_the_experiment_and_both_have_it(tmp_path):
    """Both are at the same experiment at the same time: the second starts while the first is at work."""

    def work(name):
        def make(working):
            (tmp_path / f"{name}.makes").touch()
            wait_for(tmp_path / "go on")
            return {"made by": name}

        (tmp_path / f"{name}.starts").touch()
        found = ExperimentCache(tmp_path / "experiments").get_or_make({"x": 1}, make)
        (tmp_path / f"{name}.has").write_text(found.result["made by"])

    first = forked(work, "first")
    wait_for(tmp_path / "first.makes")
    second = forked(work, "second")
    wait_for(tmp_path / "second.starts")
    time.sleep(0.3)  # for it to come to the lock
    (tmp_path / "go on").touch()
    for process in (first, second):
        process.join(120)
    assert [(tmp_path / f"{name}.has").read_text() for name in ("first", "second")] == ["first", "first"]
    assert not (tmp_path / "second.makes").exists()
    assert len(list((tmp_path / "experiments").iterdir())) == 1  # no lock is left


def test_a_folder_is_renamed_when_all_processes_of_a_training_are_done_with_it(tmp_path):
    """The second reads a file that the first wrote when the first has long had its result."""

    def work(rank):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=rank, world_size=2)

        def make(working):
            if rank == 0:
                (working / "weights.ckpt").write_text("trained")
            else:
                wait_for(working / "weights.ckpt")
                time.sleep(0.5)
            return {"found": (working / "weights.ckpt").read_text()}

        experiment = ExperimentCache(tmp_path / "experiments").get_or_make({"x": 1}, make)
        (tmp_path / f"{rank}.has").write_text(experiment.result["found"])
        torch.distributed.destroy_process_group()

    for process in [forked(work, rank) for rank in range(2)]:
        process.join(120)
    assert [(tmp_path / f"{rank}.has").read_text() for rank in range(2)] == ["trained", "trained"]


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_damaged_result_is_named(tmp_path):
    cache = ExperimentCache(tmp_path)
    experiment = cache.get_or_make({"x": 1}, lambda folder: {})
    (experiment.path / "result.json").write_text("{")
    with pytest.raises(GateError, match="damaged"):
        cache.get({"x": 1})
