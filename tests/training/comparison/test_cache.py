"""Experiments on disk: made once, whole or not there."""

import json
import multiprocessing
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch

from gates.errors import GateError
from training.comparison.cache import ExperimentCache
from training.comparison.experiments import read_weights
from training.pruner.checkpoints import read_checkpoint, write_checkpoint
from training.runs.hashing import key_of


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
    process.join()
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
        process.join()
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
        process.join()
    assert [(tmp_path / f"{rank}.has").read_text() for rank in range(2)] == ["trained", "trained"]


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def flipped(content):
    """One bit of the file is another, in its middle."""
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


DAMAGES = {
    "nothing in it": lambda content: b"",
    "half of it": lambda content: content[: len(content) // 2],
    "one bit": flipped,
    "20,000 brackets": lambda content: b"[" * 20_000,
    "no UTF-8": lambda content: b"\xe9" + content,
    "another number": lambda content: content.replace(b"0.5", b"0.9"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("name", ["result.json", "predictions.npz", "gates_over_time.csv", "checksums.json"])
def test_a_file_of_an_experiment_that_has_changed_is_named(name, damage, tmp_path):
    def make(folder):
        np.savez_compressed(folder / "predictions.npz", test_prediction=np.arange(100))
        (folder / "gates_over_time.csv").write_text("step,encoder.0.0\n1,0.5\n")
        return {"test_accuracy": 0.5}

    folder = ExperimentCache(tmp_path).get_or_make({"x": 1}, make).path
    content = (folder / name).read_bytes()
    if damage(content) == content:
        pytest.skip("there is no such number in it")
    (folder / name).write_bytes(damage(content))
    with pytest.raises(GateError, match=rf"delete '{folder}' and start again$") as told:
        ExperimentCache(tmp_path).get({"x": 1})
    assert str(folder) in str(told.value).split(";")[0]


@pytest.mark.parametrize("name", ["file.csv", "checksums.json"])
def test_a_file_of_an_experiment_that_is_gone_is_named(name, tmp_path):
    folder = ExperimentCache(tmp_path).get_or_make({"x": 1}, lambda folder: (folder / "file.csv").write_text("x") and {}).path
    (folder / name).unlink()
    with pytest.raises(GateError, match=rf"^'{folder}/{name}' of a finished experiment cannot be read: No such file"):
        ExperimentCache(tmp_path).get({"x": 1})


def test_experiments_that_have_changed_places_are_told(tmp_path):
    """Each folder is whole, but is not what its name says."""
    cache = ExperimentCache(tmp_path)
    keys = [cache.get_or_make({"a": number}, lambda folder, number=number: {"x": number}).key for number in (1, 2)]
    (tmp_path / keys[0]).rename(tmp_path / "aside")
    (tmp_path / keys[1]).rename(tmp_path / keys[0])
    with pytest.raises(GateError, match="those of another one"):
        ExperimentCache(tmp_path).get({"a": 1})


def test_damaged_weights_of_an_experiment_are_named_with_what_to_do(tmp_path):
    """They can be made again, as no checkpoint of a run can."""
    weights = tmp_path / "0a1b" / "weights.ckpt"
    write_checkpoint({"state_dict": {"a": torch.arange(99)}, "loops": {}}, weights)
    assert read_weights(weights)["a"].tolist() == list(range(99))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(GateError, match=rf"{weights}' is corrupt: .*; delete '{weights.parent}' and start again$"):
        read_weights(weights)


def with_weights(number):
    """Makes an experiment that leaves a checkpoint with a number in it."""

    def make(folder):
        write_checkpoint({"state_dict": {"a": torch.full((9,), number)}, "loops": {}}, folder / "weights.ckpt")
        return {}

    return make


def test_weights_of_another_experiment_are_not_taken(tmp_path):
    """They are whole, and no bit of them has changed."""
    folders = [ExperimentCache(tmp_path).get_or_make({"a": number}, with_weights(number)).path for number in (1, 2)]
    shutil.copyfile(folders[1] / "weights.ckpt", folders[0] / "weights.ckpt")
    with pytest.raises(
        GateError, match=rf"^cannot read '{folders[0]}/weights.ckpt' as the written file: .* delete '{folders[0]}'"
    ):
        ExperimentCache(tmp_path).get({"a": 1})
    assert ExperimentCache(tmp_path).get({"a": 2}) is not None


def test_a_copy_of_a_checkpoint_is_the_same(tmp_path):
    """What is compared is what it holds, in whatever order its parts lie in the file."""
    folder = ExperimentCache(tmp_path).get_or_make({"a": 1}, with_weights(1)).path
    content = read_checkpoint(folder / "weights.ckpt")
    (folder / "weights.ckpt").unlink()
    assert ExperimentCache(tmp_path).get({"a": 1}) is not None  # what needs the weights says that they are gone
    write_checkpoint(content, folder / "weights.ckpt")
    assert ExperimentCache(tmp_path).get({"a": 1}) is not None
