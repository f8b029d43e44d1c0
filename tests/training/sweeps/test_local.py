"""Sweeps on this machine, with a stand-in for training and for real, through to what is left after SIGKILL."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import optuna
import pandas as pd
import pytest
import yaml
from matplotlib.image import imread
from wandb.proto import wandb_internal_pb2

from tests.training.runs import write_config
from tests.training.sweeps.agent import in_agents_environment, start_with_agent
from tests.training.sweeps.files import COMMAND, GRID, quick_sweep, stand_in, write_sweep
from training.commands.table import run_command
from training.fit import main as fit
from training.runs.directory import only_writer
from training.sweeps.local import description_of, end, last_error, trial_environment
from training.sweeps.space import read_sweep
from training.sweeps.study import Trials, opened

main = partial(run_command, "sweep")
needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")


@pytest.fixture
def quick(monkeypatch):
    stand_in(monkeypatch)


def one_thread(monkeypatch):
    for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)


def table_of(run):
    return pd.read_csv(run / "sweep.csv")


def wait_for(condition, *processes):
    """Wait for a condition that these processes bring about."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        assert [process.poll() for process in processes] == [None] * len(processes)
        time.sleep(0.05)


@pytest.mark.integration
def test_a_failed_trial_is_recorded_and_the_best_is_chosen_without_the_test_split(tmp_path, capsys, quick):
    grid = {"model.price": {"values": [0.9, 0.5, 0.2]}}
    file = quick_sweep(tmp_path, method="grid", parameters=grid, run_cap=None, early_terminate={"type": "hyperband"})
    assert main([file, "--run_dir", str(tmp_path / "run"), "--jobs", "2"]) == 0
    shown = capsys.readouterr()
    assert "early_terminate" in shown.err
    assert "the price is too high" in shown.out
    table = table_of(tmp_path / "run").set_index("model.price")
    assert table["state"].to_dict() == {0.9: "failed", 0.5: "complete", 0.2: "complete"}
    assert table.loc[0.9, "error"] == "the price is too high"
    assert table.loc[0.2, "select_loss"] == pytest.approx(0.01)
    assert table.loc[0.2, "heads"] == 2
    best = yaml.safe_load((tmp_path / "run" / "best.yaml").read_text())
    assert best == {"name": "tiny-best", "run_dir": None, "existing": "refuse", "wandb": {"group": None, "name": None}}
    assert f"trial {table.loc[0.2, 'trial']}," in (tmp_path / "run" / "best.yaml").read_text()  # 0.5 is better on test
    assert imread(tmp_path / "run" / "sweep.png").std() > 0


def test_all_failed_is_an_error(tmp_path, capsys, quick):
    file = quick_sweep(tmp_path, parameters={"model.price": {"values": [0.9]}}, run_cap=2)
    assert main([file, "--run_dir", str(tmp_path / "run")]) == 2
    assert "all 2 trials failed, the last with: the price is too high" in capsys.readouterr().err


def test_a_metric_that_trials_do_not_have_ends_the_sweep_at_once(tmp_path, capsys, quick):
    file = quick_sweep(tmp_path, metric={"name": "select/bleu", "goal": "maximize"}, parameters={"model.price": {"value": 0.1}})
    assert main([file, "--run_dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "'select/bleu'" in error
    assert "it has select/loss" in error
    assert len(table_of(tmp_path / "run")) == 1


@pytest.mark.integration
def test_jobs_run_at_the_same_time_and_share_the_cores(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    file = quick_sweep(tmp_path, parameters={"model.price": {"values": [0.1]}, "meets": {"value": 2}}, run_cap=5)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--jobs", "2"]) == 0
    ended = [json.loads(path.read_text()) for path in (tmp_path / "run" / "trials").glob("*/metrics.json")]
    assert {metrics["threads"] for metrics in ended} == {"3"}
    assert max(metrics["at_once"] for metrics in ended) == 2


def test_a_trial_that_takes_too_long_is_ended_and_recorded(tmp_path, quick, monkeypatch):
    """Three minutes pass when the other trial is in the table."""

    def clock():
        table = tmp_path / "run" / "sweep.csv"
        return 180.0 if table.is_file() and "complete" in table.read_text() else 0.0

    monkeypatch.setattr("training.sweeps.local.time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    parameters = {"model.price": {"value": 0.1}, "sleep": {"values": [0, 1_000_000]}}
    file = quick_sweep(tmp_path, method="grid", parameters=parameters, run_cap=None)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--jobs", "2", "--timeout_minutes", "2"]) == 0
    table = table_of(tmp_path / "run").set_index("sleep")
    assert table.loc[0, "state"] == "complete"
    assert table.loc[1_000_000, "error"] == "not done after 2 minutes"


@pytest.mark.integration
def test_a_sweep_continues_and_repeats_nothing(tmp_path, capsys, quick):
    """Three trials, then five: the table of five at once. Another sweep, or another's directory, is refused."""
    file = quick_sweep(tmp_path, parameters={"model.price": {"min": 0.0, "max": 0.8}})
    assert main([file, "--run_dir", str(tmp_path / "whole"), "--trials", "5"]) == 0
    assert main([file, "--run_dir", str(tmp_path / "parts"), "--trials", "3"]) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts" / "trials").glob("*/metrics.json")}
    assert main([file, "--run_dir", str(tmp_path / "parts"), "--trials", "5"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    whole, parts = (table_of(tmp_path / name).drop(columns="seconds") for name in ("whole", "parts"))
    pd.testing.assert_frame_equal(whole, parts)
    with only_writer(tmp_path / "parts"):
        assert main([file, "--run_dir", str(tmp_path / "parts"), "--trials", "5"]) == 2
    assert "another process is at work" in capsys.readouterr().err
    for more, other in ((["--seed", "1"], "seed"), (["--", "--model.retrain=2"], "further")):
        assert main([file, "--run_dir", str(tmp_path / "parts"), *more]) == 2
        assert f"holds a sweep with other {other}; give another --run_dir" in capsys.readouterr().err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert main([file, "--run_dir", str(tmp_path / "mine")]) == 2
    assert "does not hold a sweep" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["garbage", "half", "gone"])
def test_a_sweep_whose_trials_cannot_be_read_ends_with_one_sentence(damage, tmp_path, capsys, quick):
    file, database = quick_sweep(tmp_path), tmp_path / "run" / "study.db"
    assert main([file, "--run_dir", str(tmp_path / "run"), "--trials", "1"]) == 0
    content = database.read_bytes()
    database.unlink()
    if damage != "gone":
        database.write_bytes(content[: len(content) // 2] if damage == "half" else b"garbage" * 1000)
    kept = (tmp_path / "run" / "sweep.csv").read_bytes()
    assert main([file, "--run_dir", str(tmp_path / "run"), "--trials", "2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert "study.db" in error
    assert "give another --run_dir" in error
    assert (tmp_path / "run" / "sweep.csv").read_bytes() == kept


@pytest.mark.integration
def test_a_planned_trial_that_was_killed_before_it_had_its_options_gets_them(tmp_path, quick):
    file = quick_sweep(tmp_path, method="grid", parameters=GRID, run_cap=None)
    assert main([file, "--run_dir", str(tmp_path / "run"), "--trials", "2"]) == 0
    study = optuna.load_study(study_name="tiny", storage=f"sqlite:///{tmp_path / 'run' / 'study.db'}")
    study.enqueue_trial({}, user_attrs={"params": {"model.price": "0.2", "seed": "0"}})
    assert study.ask().params == {}
    assert main([file, "--run_dir", str(tmp_path / "run")]) == 0
    table = table_of(tmp_path / "run")
    assert set(table["state"]) == {"complete"}
    assert {*zip(table["model.price"], table["seed"], strict=True)} == {(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)}


def test_a_trial_whose_process_lives_on_is_not_started_again(tmp_path, capsys, quick, monkeypatch):
    """As after SIGKILL of the sweep alone."""
    monkeypatch.setattr("training.runs.directory.WAIT", 0.1)
    arguments, run = [quick_sweep(tmp_path), "--run_dir", str(tmp_path / "run"), "--trials", "1"], tmp_path / "run"
    sweep = read_sweep(Path(arguments[0]))
    with only_writer(run), opened(run, sweep, None) as study:
        trials = Trials(study, sweep, 1, 0)
        trials.plan()
        assert trials.begin() == 0
        study.set_user_attr("sweep", description_of(sweep, [], 0, None))
    with only_writer(run / "trials" / "0"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.sweeps.local.check_directory", lambda *_: None)
        assert main(arguments) == 2
    assert "another process is at work in" in capsys.readouterr().err
    assert main(arguments) == 0
    assert list(table_of(run)["trial"]) == [0]


@pytest.mark.integration
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_ctrl_c_ends_the_trials_and_the_same_command_continues(sent, tmp_path, capsys, quick, monkeypatch):
    trials, gate, processes = tmp_path / "run" / "trials", tmp_path / "go", []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: processes.append(popen(*given, **more)) or processes[-1])
    parameters = {"model.price": {"min": 0.0, "max": 0.8}, "waits_for": {"value": str(gate)}}
    arguments = [quick_sweep(tmp_path, parameters=parameters), "--run_dir", str(tmp_path / "run"), "--jobs", "2"]

    def interrupt():
        wait_for(lambda: len(list(trials.glob("*/config.yaml"))) == 2)
        os.kill(os.getpid(), sent)

    watcher = threading.Thread(target=interrupt, daemon=True)
    watcher.start()
    assert main(arguments) == 130
    watcher.join()
    assert [process.poll() is None for process in processes] == [False, False]
    assert "the same command continues" in capsys.readouterr().err
    before = table_of(tmp_path / "run")
    assert list(before["state"]) == ["running"] * 2
    gate.touch()
    assert main(arguments) == 0
    table = table_of(tmp_path / "run")
    assert list(table["state"]) == ["complete"] * 4
    assert list(table["model.price"][:2]) == list(before["model.price"])


def test_each_job_has_a_gpu_where_there_are_several(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [trial_environment(3, slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "7", "4"]
    assert trial_environment(1, 0)["CUDA_VISIBLE_DEVICES"] == "4,7"


@pytest.mark.integration
def test_a_trial_runs_in_a_folder_with_a_module_of_the_packages_name(tmp_path):
    (tmp_path / "training.py").write_text("raise SystemExit('the module of the user')\n")
    command = [sys.executable, "-m", "training.fit", "--compare", "never"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=trial_environment(1, 0))
    assert done.returncode == 2
    assert "never" in done.stderr


def test_a_process_that_ignores_ctrl_c_is_killed(monkeypatch):
    monkeypatch.setattr("training.sweeps.local.GRACE", 0.5)
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], process_group=0, stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        end([process])
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("log", "returncode", "why"),
    [
        ("a warning\nerror: the budget is 99\nmore\n", 2, "the budget is 99"),
        ("Traceback\nValueError: a mistake\n\n", 1, "ValueError: a mistake"),
        ("", 1, "exit code 1"),
        ("error: too late\n", -9, "ended by SIGKILL"),
    ],
)
def test_why_a_trial_failed(tmp_path, log, returncode, why):
    (tmp_path / "0.log").write_text(log)
    assert last_error(tmp_path / "0.log", returncode) == why


# -- for real ----------------------------------------------------------------------------------------------------


def read_wandb(run):
    """Return group, name, sweep, configuration and summary of an offline run, from W&B's own transaction log."""
    from tests.training.test_fit import wandb_records

    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found, summary = None, {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "run":
            found = record.run
        elif record.WhichOneof("record_type") == "summary":
            summary |= {item.key or "/".join(item.nested_key): item.value_json for item in record.summary.update}
    config = {item.key: json.loads(item.value_json) for item in found.config.update}
    return found, config, summary


def sweep_command(file, folder, *more):
    return [str(file), "--run_dir", str(folder), "--jobs", "2", *more, "--", "--config", write_config(file.parent)]


@pytest.fixture(scope="module")
def real_sweep(tmp_path_factory):
    """Two real trials at a time, each with an offline W&B run."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        one_thread(patch)
        assert main([*sweep_command(write_sweep(folder), folder / "tiny"), "--wandb.mode=auto"]) == 0
    return folder / "tiny"


@pytest.mark.nightly
def test_trials_are_runs_of_one_wandb_group_with_their_options(real_sweep):
    table = table_of(real_sweep)
    assert list(table["state"]) == ["complete"] * 2
    for row in table.to_dict("records"):
        run = real_sweep / "trials" / str(row["trial"])
        found, config, summary = read_wandb(run)
        assert (found.run_group, found.display_name) == ("tiny", f"tiny-{row['trial']}")
        assert config["model"]["gate_learning_rate"] == pytest.approx(row["model.gate_learning_rate"])
        assert config["model"]["budget"] == row["model.budget"]
        assert config["model"]["retrain"] == 0.5
        assert "select/loss" in summary  # what the file's metric names, for W&B's own agent
        comparison = pd.read_csv(run / "comparison.csv").query("method == 'learned' and stage == 'retrained'").iloc[0]
        for name in ("heads", "select_loss", "select_accuracy", "test_accuracy"):
            assert row[name] == pytest.approx(comparison[name])
        assert row["heads"] == {2.0: 2, 0.5: 4}[row["model.budget"]]
    gates = [pd.read_csv(real_sweep / "trials" / str(trial) / "gates_over_time.csv") for trial in table["trial"]]
    assert not gates[0].equals(gates[1])


@pytest.mark.nightly
def test_the_best_configuration_gives_the_best_result_again(real_sweep, tmp_path):
    arguments = ["--config", str(real_sweep / "best.yaml"), "--run_dir", str(tmp_path / "again"), "--wandb.mode=disabled"]
    assert fit(arguments) == 0
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())["run"]["result"]
    assert again["select_loss"] == pytest.approx(table_of(real_sweep)["select_loss"].min(), rel=1e-6)


@pytest.mark.nightly
@needs_proc
def test_a_sweep_that_was_killed_gives_the_same_table(real_sweep, tmp_path, monkeypatch, capfd):
    """SIGKILL of the sweep and of two trials that train; they continue, and a third follows."""
    one_thread(monkeypatch)
    shutil.copy(real_sweep.parent / "sweep_file.yaml", tmp_path)
    arguments = [*sweep_command(tmp_path / "sweep_file.yaml", tmp_path / "run", "--trials", "3"), "--save_every=4"]
    sweep = subprocess.Popen([sys.executable, "-m", "training", "sweep", *arguments])
    trials = tmp_path / "run" / "trials"
    try:
        wait_for(lambda: len(list(trials.glob("*/experiments/.*/last.ckpt"))) == 2, sweep)
        stats = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat")}
        children = [pid for pid, stat in stats.items() if stat.rsplit(")", 1)[1].split()[1] == str(sweep.pid)]
        assert len(children) == 2
    finally:
        sweep.kill()
        sweep.wait()
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    (trials / "0" / "mark").touch()  # a run that begins again empties its directory
    assert main(arguments) == 0
    assert "2 begun before" in capfd.readouterr().out
    assert (trials / "0" / "mark").is_file()
    table, whole = (table_of(run).drop(columns=["seconds", "error"]) for run in (tmp_path / "run", real_sweep))
    assert list(table["state"]) == ["complete"] * 3
    pd.testing.assert_frame_equal(table[:2], whole, rtol=1e-6)


@pytest.mark.nightly
def test_the_agents_trial_is_an_offline_run_of_the_sweep(tmp_path, monkeypatch):
    """W&B's own agent starts training.fit with its own command and environment; their server alone is left out."""
    one_thread(monkeypatch)
    in_agents_environment(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    more = ["--config", write_config(tmp_path), "--wandb.mode=auto", "--run_dir=run", "--model.budget=null"]
    path = write_sweep(tmp_path, command=[*COMMAND[:-1], *more, "${args}"])
    agent = start_with_agent(path, {"model.price": 0.25, "model.gate_learning_rate": 0.2})
    assert agent._run_processes["trial7"].wait() == 0
    found, config, summary = read_wandb(tmp_path / "run")
    assert (found.run_id, found.sweep_id) == ("trial7", "s1")
    assert (config["model.price"], config["model"]["price"], config["model"]["budget"]) == (0.25, 0.25, None)
    assert {"select/loss", "select/accuracy"} <= set(summary)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["gate_learning_rate"] == 0.2
