"""Sweeps whose trials are in a database: directories share them, each trial is done once, and each goes on with its own."""

import subprocess
import sys
from pathlib import Path

import optuna
import pandas as pd
import pytest
import yaml
from optuna.trial import TrialState

from gates.errors import GateError
from tests.training.sweeps.test_local import main, quick, quick_sweep, wait_for  # noqa: F401 (a fixture)
from training.sweeps.space import read_sweep
from training.sweeps.studies import WORKER, Trials, check_storage, shared_study, without_password

GRID = {"model.price": {"values": [0.1, 0.2, 0.3, 0.4]}, "seed": {"values": [0, 1]}}
MACHINE = """
import sys
import pytest
from tests.training.sweeps import test_local

with pytest.MonkeyPatch.context() as patch:
    test_local.stand_in(patch)
    sys.exit(test_local.main(sys.argv[1:]))
"""


def storage_of(folder):
    return f"sqlite:///{folder / 'shared.db'}"


def table_of(folder):
    return pd.read_csv(folder / "sweep.csv")


def trials_of(file, storage, count, worker, described=None):
    sweep = read_sweep(Path(file))
    study = shared_study(storage, sweep, described or {"name": "tiny"})
    return Trials(study, sweep, count, 0, worker)


@pytest.mark.nightly
def test_two_machines_do_every_trial_once(tmp_path):
    """They wait for each other to have begun; then each has a share, and both write the table and the best of all."""
    gate, places = tmp_path / "go", [tmp_path / "one", tmp_path / "two"]
    parameters = GRID | {"waits_for": {"value": str(gate)}}
    file = quick_sweep(tmp_path, method="grid", parameters=parameters, run_cap=None)
    command = [sys.executable, "-c", MACHINE, file, "--storage", storage_of(tmp_path), "--jobs", "2"]
    machines = [
        subprocess.Popen([*command, "--run_dir", str(place)], cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL)
        for place in places
    ]
    try:
        wait_for(lambda: all(len(list(place.glob("trials/*/config.yaml"))) == 2 for place in places), *machines)
        gate.touch()
        assert [machine.wait() for machine in machines] == [0, 0]
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    tables = [table_of(place) for place in places]
    whole = max(tables, key=lambda table: (table["state"] == "complete").sum())
    assert list(whole["state"]) == ["complete"] * 8
    assert len(set(zip(whole["model.price"], whole["seed"], strict=True))) == 8
    own = [{path.name for path in place.glob("trials/[0-9]*") if path.is_dir()} for place in places]
    assert not own[0] & own[1]
    assert own[0] | own[1] == {str(number) for number in whole["trial"]}
    best = {yaml.safe_load((place / "best.yaml").read_text())["name"] for place in places}
    assert best == {"tiny-best"}


@pytest.mark.integration
def test_trials_of_one_directory_in_a_database_are_those_in_a_file(tmp_path, quick):  # noqa: F811
    file = quick_sweep(tmp_path, run_cap=5)
    assert main([file, "--run_dir", str(tmp_path / "file")]) == 0
    assert main([file, "--run_dir", str(tmp_path / "shared"), "--storage", storage_of(tmp_path)]) == 0
    one, other = (table_of(tmp_path / name).drop(columns="seconds") for name in ("file", "shared"))
    pd.testing.assert_frame_equal(one, other)
    assert not (tmp_path / "shared" / "study.db").exists()
    best = [yaml.safe_load((tmp_path / name / "best.yaml").read_text()) for name in ("file", "shared")]
    assert best[0] == best[1]


def test_a_machine_without_trials_writes_the_best_of_another(tmp_path, quick):  # noqa: F811
    file, storage = quick_sweep(tmp_path), storage_of(tmp_path)
    assert main([file, "--run_dir", str(tmp_path / "one"), "--storage", storage]) == 0
    assert main([file, "--run_dir", str(tmp_path / "two"), "--storage", storage]) == 0
    assert not (tmp_path / "two" / "trials").exists()
    for name in ("sweep.csv", "best.yaml"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()


def test_each_directory_goes_on_with_its_own_trials(tmp_path, quick):  # noqa: F811
    """One that was killed left a trial; another machine's running one is left to it."""
    file, storage = quick_sweep(tmp_path, run_cap=4), storage_of(tmp_path)
    assert main([file, "--run_dir", str(tmp_path / "one"), "--storage", storage, "--trials", "1"]) == 0
    note = yaml.safe_load((tmp_path / "one" / "sweep.yaml").read_text())
    study = optuna.load_study(study_name="tiny", storage=storage)
    sweep, described = read_sweep(Path(file)), study.user_attrs["sweep"]
    assert {name: note[name] for name in described} == described
    mine, others = (Trials(shared_study(storage, sweep, described), sweep, 4, 0, who) for who in (note[WORKER], "another"))
    assert (mine.next().number, others.next().number) == (1, 2)
    assert (mine.left_behind(), others.left_behind()) == ([1], [2])
    assert main([file, "--run_dir", str(tmp_path / "one"), "--storage", storage]) == 0
    states = table_of(tmp_path / "one").set_index("trial")["state"].to_dict()
    assert states.pop(2) == "running"
    assert {*states} == {0, 1, 3}
    assert {*states.values()} <= {"complete", "failed"}


def test_no_more_trials_are_begun_than_there_should_be(tmp_path):
    """Two look at once, and both see room for one."""
    file, storage = quick_sweep(tmp_path), storage_of(tmp_path)
    one, other = (trials_of(file, storage, 3, who) for who in "ab")
    assert [one.next().number, one.next().number] == [0, 1]
    assert one.open()
    assert other.open()
    assert other.next().number == 2
    assert one.next() is None
    assert not one.open()
    assert [trial.number for trial in one.known()] == [0, 1, 2]
    assert [trial.state for trial in one.study.trials] == [TrialState.RUNNING] * 3 + [TrialState.PRUNED]
    assert trials_of(file, storage, 4, "b").next().number == 4  # later more are wanted


def test_a_cell_of_a_grid_that_another_one_has_is_given_back(tmp_path, monkeypatch):
    file = quick_sweep(tmp_path, method="grid", parameters={"model.price": {"values": [0.1, 0.2]}}, run_cap=None)
    one, fewer, other = (trials_of(file, storage_of(tmp_path), count, who) for count, who in ((2, "a"), (1, "b"), (2, "c")))
    taken = one.next().params
    assert fewer.next() is None  # so that numbers are no longer those of cells
    with monkeypatch.context() as patched:  # as if the other one had not yet seen the first
        patched.setattr(optuna.samplers.GridSampler, "_get_unvisited_grid_ids", lambda self, study: [0])
        assert other.next() is None
    found = other.next()
    assert found.params != taken
    assert [trial.params for trial in one.known()] == [taken, found.params]
    assert not one.open()


def test_random_trials_of_two_machines_differ(tmp_path):
    file, storage = quick_sweep(tmp_path), storage_of(tmp_path)
    one, other = (trials_of(file, storage, 8, who) for who in "ab")
    drawn = [which.next().params["model.price"] for which in (one, other, other, one)]
    assert len(set(drawn)) == 4


def test_another_sweep_of_the_name_and_another_place_are_refused(tmp_path, capsys, quick):  # noqa: F811
    storage, run = storage_of(tmp_path), str(tmp_path / "run")
    assert main([quick_sweep(tmp_path), "--run_dir", run, "--storage", storage, "--trials", "1"]) == 0
    capsys.readouterr()
    for more, said in (
        (["--storage", storage_of(tmp_path / "run")], "holds a sweep whose storage is"),
        ([], "holds a sweep whose storage is"),
        (["--storage", storage, "--seed", "3", "--run_dir", str(tmp_path / "other")], "called 'tiny' with other seed"),
    ):
        assert main([quick_sweep(tmp_path), "--run_dir", run, *more]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "other" / "sweep.yaml").exists()
    changed = quick_sweep(tmp_path, parameters={"model.price": {"min": 0.0, "max": 0.5}})
    assert main([changed, "--run_dir", str(tmp_path / "third"), "--storage", storage]) == 2
    assert "called 'tiny' with other space" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("runs/study.db", "expected the address of a database"),
        ("sqlite://", "gone with its process"),
        ("sqlite:////no/such/folder/a.db", "cannot be used: "),
        ("nothing://somewhere/a", "cannot be used: "),
        ("oracle://user:secret@host/a", "needs a driver that is not installed"),
    ],
)
def test_databases_that_cannot_be_had_are_told_in_one_sentence(url, said, tmp_path, capsys, quick, monkeypatch):  # noqa: F811
    monkeypatch.setattr("training.sweeps.studies.PAUSE", 0.0)
    assert main([quick_sweep(tmp_path), "--run_dir", str(tmp_path / "run"), "--storage", url]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
    assert "Traceback" not in error
    assert not (tmp_path / "run" / "sweep.yaml").exists()


def test_passwords_are_written_nowhere():
    assert without_password("postgresql://me:secret@host/a") == "postgresql://me:***@host/a"
    with pytest.raises(GateError, match="expected the address"):
        check_storage("no address")


def test_a_database_that_goes_away_ends_the_sweep_with_one_sentence(tmp_path, capsys, quick, monkeypatch):  # noqa: F811
    file, storage = quick_sweep(tmp_path), storage_of(tmp_path)

    def gone(trials):
        raise optuna.exceptions.StorageInternalError("the server is gone")

    monkeypatch.setattr(Trials, "next", gone)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--storage", storage]) == 2
    error = capsys.readouterr().err
    assert "the server is gone" in error
    assert "the same command goes on where it was" in error
