"""A comparison on a real cluster of two nodes: the tables of one process, also when a worker is lost; and what is refused."""

import filecmp
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pandas as pd
import pytest

from gates.errors import GateError
from tests.training.runs import make_setup, write_config
from training.comparison.on_ray import Task, Terms, check_done, marked, software, take_place, work
from training.comparison.plan import DENSE, Comparison

pytest.importorskip("ray", reason="Ray, an extra, is not installed")

DEADLY = """
import os, signal
from pathlib import Path

def score(subject):
    if not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [gate % 3 for gate in range(subject.gates.size)]
"""
MEASURED = ["seconds", "peak_memory_mb"]
TASK = Task(0, DENSE, None, None, (True,), ())


@pytest.fixture
def cluster():
    """Two nodes with one processor core each."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.add_node(num_cpus=1)
    yield started
    started.shutdown()


def compare(folder, *more):
    given = ["--config", write_config(folder), "--methods", "learned,his+swap,deadly:score", "--budgets", "3", "--seeds", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "training", "compare", *given, *more],
        capture_output=True, text=True, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.nightly
def test_the_tables_are_those_of_one_process_though_a_worker_dies(cluster, tmp_path):
    """Shared by all nodes is the folder; the user's own score kills the first worker that comes to it."""
    (tmp_path / "deadly.py").write_text(DEADLY)
    compare(tmp_path, "--run_dir", "ray", "--launcher", "ray", "--ray_address", cluster.address)
    assert (tmp_path / "died").exists()
    compare(tmp_path, "--run_dir", "serial")
    for name in ("masks.json", "scores.csv", "gates_over_time.csv", "agreement.csv", "statistics.csv", "verdict.md"):
        assert filecmp.cmp(tmp_path / "ray" / name, tmp_path / "serial" / name, shallow=False), name
    ray, serial = (pd.read_csv(tmp_path / run / "comparison.csv").drop(columns=MEASURED) for run in ("ray", "serial"))
    pd.testing.assert_frame_equal(ray, serial, check_exact=True)
    assert serial["test_loss"].nunique() >= 6
    folders = [{path.name for path in (tmp_path / run / "experiments").glob("[!.]*")} for run in ("ray", "serial")]
    assert folders[0] == folders[1]
    assert not list((tmp_path / "ray" / "experiments").glob(".shared-*"))


# -- what a worker refuses --------------------------------------------------------------------------------------


@pytest.fixture
def terms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which a worker sets
    with marked(tmp_path / "experiments") as mark:
        yield Terms(b"", tmp_path, mark, software(), threads=1, on_gpu=False)


def test_a_worker_takes_its_place_in_the_command_s_directory(terms, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    take_place(terms)
    assert os.getcwd() == str(tmp_path)


def test_a_machine_that_shares_nothing_or_has_other_software_is_refused(terms, tmp_path):
    for changed, said in (
        ({"directory": tmp_path / "elsewhere"}, "has no directory .*elsewhere.*; start the command in one that all"),
        ({"mark": tmp_path / "experiments" / ".shared-other"}, "experiments.* are not those that the machine .* has there"),
        ({"software": terms.software | {"torch": "1.0"}}, "has torch .*, but this one 1.0, so results could differ"),
        ({"software": terms.software | {"code of head-gates": "x"}}, "has code of head-gates .*, but this one x"),
    ):
        with pytest.raises(GateError, match=said):
            take_place(replace(terms, **changed))
        assert work(replace(terms, **changed), TASK) is not None  # told, not raised, so that it comes to the user as it is


def test_the_mark_goes_with_the_command(tmp_path):
    with marked(tmp_path / "experiments") as mark:
        assert mark.is_file()
    assert list((tmp_path / "experiments").iterdir()) == []


def test_what_a_task_needs_and_did_not_get_ends_it(terms):
    assert work(terms, TASK, None, "the data are damaged") == "the data are damaged"


def test_a_complaint_comes_back_from_a_task(terms, tmp_path):
    """Of budgets that the model cannot have."""
    asked = Comparison(make_setup(), [DENSE], [100], [0], ["post hoc"], tmp_path / "experiments", {})
    assert "100" in work(replace(terms, comparison=pickle.dumps(asked)), TASK)


# -- what the command makes of it -------------------------------------------------------------------------------


def test_errors_of_tasks_come_as_what_they_are(monkeypatch):
    import ray
    from ray.exceptions import RayTaskError, WorkerCrashedError

    def ends_with(outcome):
        def get(promised):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(ray, "get", get)
        check_done(object(), TASK)

    ends_with(None)
    with pytest.raises(GateError, match=r"^no such column$"):
        ends_with("no such column")
    with pytest.raises(GateError, match=r"seed 0, dense.* was lost 4 times: .*; start the same command again"):
        ends_with(WorkerCrashedError())
    with pytest.raises(OSError, match="No space left"):
        ends_with(RayTaskError("work", "traceback", OSError(28, "No space left on device", "weights.ckpt")))
