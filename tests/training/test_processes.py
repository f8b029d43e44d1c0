"""Work of the first process, and values of all, in two real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gates.errors import GateError
from tests.training.runs import STEPS_PER_EPOCH, last_checkpoint, make_data, make_pruner, write_config
from training.pruner.callbacks import Predictions
from training.pruner.checkpoints import read_checkpoint
from training.runs import processes


def told_all(rank, world, folder):
    """One of several processes; writes what it was told."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    found = {"world": processes.world_size(), "first": processes.is_first(), "worked": 0}

    def work():
        found["worked"] += 1
        return {"rank": rank, "answer": 42}

    def fails():
        raise GateError(f"process {rank} has no disk")

    found["in_first"] = processes.in_first(work)
    try:
        processes.in_first(fails)
    except GateError as error:
        found["error"] = str(error)
    try:
        processes.in_first(lambda: 1 / 0)
    except (GateError, ZeroDivisionError) as error:  # nobody waits in vain
        found["failure"] = (type(error).__name__, str(error))
    data = make_data()  # no trainer has had it
    loaders = (data.score_dataloader(), *data.calibration_dataloaders(20))
    found["rows"] = [[row for batch in loader.batch_sampler for row in batch] for loader in loaders]
    found["gathered"] = processes.gathered(f"value of {rank}")
    found["predictions"] = {name: values.tolist() for name, values in predictions_of(rank, world).arrays().items()}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


CLASSES, TARGETS = [3, 1, 4, 1, 5, 2, 6], [3, 1, 4, 0, 5, 2, 0]
TEXTS = ["one", "two", "three", "four", "five"]


def predictions_of(rank, world):
    """What a process keeps that evaluates every so many-th example, in batches of two."""
    kept, pruner = Predictions(), make_pruner()
    classes, targets = CLASSES[rank::world], TARGETS[rank::world]
    for first in range(0, len(classes), 2):
        logits = torch.nn.functional.one_hot(torch.tensor(classes[first : first + 2]), 7).float()
        kept.on_validation_batch_end(None, pruner, logits, {"labels": torch.tensor(targets[first : first + 2])})
    rows = list(range(len(TEXTS)))[rank::world][::-1]  # grouped by length, a split is not in its order
    kept.on_test_batch_end(None, pruner, None, {"row": torch.tensor(rows), "reference": [TEXTS[row] for row in rows]})
    kept._texts["test"] = {"greedy": [f"said {text}" for text in TEXTS], "beam": TEXTS}
    return kept


EXPECTED = {
    "select_prediction": CLASSES,
    "select_target": TARGETS,
    "test_prediction": [f"said {text}" for text in TEXTS],
    "test_prediction_beam": TEXTS,
    "test_target": TEXTS,
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_two_processes_are_told_the_same(tmp_path):
    """They are forked, since each would otherwise import everything again; they compute nothing that needs threads."""
    make_data()  # encoded here, so that the processes need not
    torch.multiprocessing.start_processes(told_all, (2, str(tmp_path)), nprocs=2, start_method="fork")
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert [one["world"] for one in found] == [2, 2]
    assert [one["first"] for one in found] == [True, False]
    assert [one["worked"] for one in found] == [1, 0]
    for one in found:
        assert one["in_first"] == {"rank": 0, "answer": 42}
        assert one["error"] == "process 0 has no disk"
        assert one["gathered"] == ["value of 0", "value of 1"]
        assert one["predictions"] == EXPECTED  # seven examples in parts of four and three, as one process has them
    assert found[0]["failure"] == ("ZeroDivisionError", "division by zero")
    assert found[1]["failure"] == ("GateError", "division by zero")
    for first, second, rows in zip(found[0]["rows"], found[1]["rows"], (64, 10, 10), strict=True):
        assert sorted([*first, *second]) == list(range(rows))  # every example once, although no trainer has had the data


def test_one_process_needs_no_others():
    assert processes.world_size() == 1
    assert processes.is_first()
    assert processes.in_first(lambda: 7) == 7
    assert processes.gathered("alone") == ["alone"]
    with pytest.raises(GateError, match="no disk"):
        processes.in_first(lambda: (_ for _ in ()).throw(GateError("no disk")))


def test_predictions_of_one_process_are_in_the_order_of_evaluation():
    found = predictions_of(0, 1).arrays()
    assert {name: values.tolist() for name, values in found.items()} == EXPECTED
    assert found["select_prediction"].dtype == np.int32


@pytest.mark.nightly
def test_a_process_of_a_run_that_dies_ends_it_with_one_sentence(tmp_path):
    """Nobody waits for it, and what is said is one sentence."""
    two = ["--trainer.devices", "2", "--trainer.strategy", "ddp", "--model.finetune", "40", "--run_dir", "run"]
    command = [sys.executable, "-m", "training.fit", "--config", write_config(tmp_path), *two]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as first:
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        while last_checkpoint(tmp_path / "run") is None:
            assert first.poll() is None
            time.sleep(0.1)
        second = next(int(one) for one in children.read_text().split() if b"fit" in Path(f"/proc/{one}/cmdline").read_bytes())
        os.kill(second, signal.SIGKILL)
        errors = first.communicate()[1]
    assert first.returncode == 2, errors[-3000:]
    assert re.search(
        r"^error: another process of this job died \(.*\), .*; continue with .*--existing resume$", errors, re.MULTILINE
    )
    assert "Traceback" not in errors
    steps = read_checkpoint(last_checkpoint(tmp_path / "run"))["global_step"]
    assert 0 < steps < 40 * STEPS_PER_EPOCH // 2
