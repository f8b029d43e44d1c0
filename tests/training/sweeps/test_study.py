"""Sweeps whose trials are in a database that directories share: each trial is done once, and each continues with its own."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from optuna.trial import TrialState

from gates.errors import GateError
from tests.training.sweeps.files import GRID, quick_sweep, stand_in
from tests.training.sweeps.test_local import main, table_of, wait_for
from training.sweeps.space import read_sweep
from training.sweeps.study import Trials, opened, without_password, worker_of

MACHINE = """
import sys
import pytest
from tests.training.sweeps.files import stand_in
from tests.training.sweeps.test_local import main

with pytest.MonkeyPatch.context() as patch:
    stand_in(patch)
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    stand_in(monkeypatch)


def storage_of(folder):
    return f"sqlite:///{folder / 'shared.db'}"


def workers(file, storage, *names, count=4):
    """Return the trials of a sweep as several directories see them."""
    sweep = read_sweep(Path(file))
    with opened(Path("nowhere"), sweep, storage) as study:
        found = [Trials(study, sweep, count, 0, name) for name in names]
    for trials in found:
        trials.plan()
    return found


@pytest.mark.nightly
def test_two_machines_do_every_trial_once(tmp_path):
    """They wait for each other to have begun; then each has a share, and both write the table and the best of all."""
    gate, places = tmp_path / "go", [tmp_path / "one", tmp_path / "two"]
    parameters = GRID | {"model.price": {"values": [0.1, 0.2, 0.3, 0.4]}, "waits_for": {"value": str(gate)}}
    file, machines = quick_sweep(tmp_path, method="grid", parameters=parameters, run_cap=None), []
    command = [sys.executable, "-c", MACHINE, file, "--storage", storage_of(tmp_path), "--jobs", "2"]
    try:
        for place in places:
            given, root = [*command, "--run_dir", str(place)], Path(__file__).parents[3]
            machines.append(subprocess.Popen(given, cwd=root, stdout=subprocess.DEVNULL))
            wait_for(lambda place=place: len(list(place.glob("trials/*/config.yaml"))) == 2, *machines)
        gate.touch()
        assert [machine.wait() for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    whole = max(map(table_of, places), key=lambda table: (table["state"] == "complete").sum())
    assert list(whole["state"]) == ["complete"] * 8
    assert len(set(zip(whole["model.price"], whole["seed"], strict=True))) == 8
    own = [{path.name for path in place.glob("trials/[0-9]*") if path.is_dir()} for place in places]
    assert not own[0] & own[1]
    assert own[0] | own[1] == {str(number) for number in whole["trial"]}
    assert {yaml.safe_load((place / "best.yaml").read_text())["name"] for place in places} == {"tiny-best"}


@pytest.mark.integration
def test_directories_of_one_database_have_the_trials_of_a_file(tmp_path):
    """One machine does all trials, another writes the best of them."""
    file, shared = quick_sweep(tmp_path), ["--storage", storage_of(tmp_path)]
    for name, more in (("file", []), ("one", shared), ("two", shared)):
        assert main([file, "--run_dir", str(tmp_path / name), *more]) == 0
    alone, one, two = (table_of(tmp_path / name) for name in ("file", "one", "two"))
    pd.testing.assert_frame_equal(alone.drop(columns="seconds"), one.drop(columns="seconds"))
    pd.testing.assert_frame_equal(one, two)
    assert not (tmp_path / "two" / "trials").exists()
    assert (tmp_path / "one" / "best.yaml").read_text() == (tmp_path / "two" / "best.yaml").read_text()
    assert [(tmp_path / name / "study.db").exists() for name in ("file", "one", "two")] == [True, False, False]


@pytest.mark.integration
def test_each_directory_continues_with_its_own_trials(tmp_path):
    """One that was killed left a trial; another machine's running one is left to it."""
    file, storage, run = quick_sweep(tmp_path), storage_of(tmp_path), tmp_path / "one"
    assert main([file, "--run_dir", str(run), "--storage", storage, "--trials", "1"]) == 0
    mine, others = workers(file, storage, worker_of(run), "another")
    assert (mine.begin(), others.begin()) == (1, 2)
    assert (mine.left_behind(), others.left_behind()) == ([1], [2])
    assert main([file, "--run_dir", str(run), "--storage", storage]) == 0
    states = table_of(run).set_index("trial")["state"].to_dict()
    assert states.pop(2) == "running"
    assert {*states} == {0, 1, 3}
    assert {*states.values()} <= {"complete", "failed"}


@pytest.mark.parametrize("method", ["grid", "random"])
def test_planned_trials_are_begun_once_however_many_look_at_them(method, tmp_path):
    changes = {"method": method, "parameters": GRID, "run_cap": 4}
    one, other, fewer = workers(quick_sweep(tmp_path, **changes), storage_of(tmp_path), "a", "b", "c")
    assert [which.begin() for which in (one, other, other, one)] == [0, 1, 2, 3]
    assert not one.are_left()
    assert one.begin() is None  # as if the other had taken the last one in this moment
    assert [trial.number for trial in fewer.begun()] == [0, 1, 2, 3]
    assert {trial.state for trial in one.study.get_trials()} == {TrialState.RUNNING, TrialState.PRUNED}


def test_bayesian_trials_of_two_machines_differ(tmp_path):
    one, other = workers(quick_sweep(tmp_path, method="bayes", run_cap=9), storage_of(tmp_path), "a", "b")
    for which in (one, other, other, one):
        which.begin()
    assert len({trial.values["model.price"] for trial in one.begun()}) == 4


def test_another_sweep_of_the_name_and_another_place_are_refused(tmp_path, capsys):
    storage, run = storage_of(tmp_path), str(tmp_path / "run")
    assert main([quick_sweep(tmp_path), "--run_dir", run, "--storage", storage, "--trials", "1"]) == 0
    other = str(tmp_path / "other")
    for more, said in (
        (["--storage", storage_of(tmp_path / "run")], "holds a sweep with other storage"),
        ([], "holds a sweep with other storage"),
        (["--storage", storage, "--seed", "3", "--run_dir", other], "the database holds a sweep with other seed"),
    ):
        assert main([quick_sweep(tmp_path), "--run_dir", run, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "other" / "sweep.yaml").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("runs/study.db", "expected one that can be reached, such as sqlite:"),
        ("sqlite://", "gone with its process"),
        ("sqlite:////no/such/folder/a.db", "cannot be used"),
        ("nothing://somewhere/a", "cannot be used"),
        ("oracle://user:secret@host/a", "with its driver installed"),
    ],
)
def test_databases_that_cannot_be_used_are_one_sentence(url, said, tmp_path):
    with pytest.raises(GateError, match=said) as caught, opened(tmp_path, read_sweep(Path(quick_sweep(tmp_path))), url):
        pytest.fail("it is opened")
    assert "secret" not in str(caught.value)
    assert without_password("postgresql://me:secret@host/a") == "postgresql://me:***@host/a"
