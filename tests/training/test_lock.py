"""One command at a time writes into a run directory."""

import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from gates.errors import GateError
from tests.training.runs import write_config
from training.commands.table import run_command
from training.config import RunOptions
from training.runs.directory import LOCK, is_abandoned, locked_directory, only_writer, refuse_busy, writing_to

HOLDER = """
import sys, time
from pathlib import Path
from training.runs.directory import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hold():
    """Lets another process be at work in a directory."""
    holders = []

    def hold(folder):
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout.readline() == "held\n"
        return holder

    yield hold
    for holder in holders:
        holder.kill()
        holder.communicate()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("training.runs.directory.WAIT", 0.2)


def test_the_second_writer_is_refused_and_the_lock_ends_with_its_process(hold, tmp_path):
    holder = hold(tmp_path)
    with pytest.raises(GateError, match="another process is at work"), only_writer(tmp_path):
        pytest.fail("two at once")
    with pytest.raises(GateError, match="another process is at work"):
        refuse_busy(tmp_path)
    assert not is_abandoned(tmp_path)
    holder.kill()
    holder.wait()
    refuse_busy(tmp_path)
    assert is_abandoned(tmp_path)
    with only_writer(tmp_path):
        assert (tmp_path / LOCK).is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_into_which_nothing_came_goes_again(tmp_path):
    (tmp_path / "there").mkdir()
    with only_writer(tmp_path / "there" / "new" / "run"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with only_writer(tmp_path / "there" / "new" / "run"):
        (tmp_path / "there" / "new" / "run" / "config.yaml").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.yaml", "new", "run", "there"]


def test_runs_without_a_directory_that_start_together_get_numbers(hold, tmp_path, monkeypatch):
    """Also while the first has written nothing yet; what one left that was killed before it wrote anything is taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEAD_GATES_RUN_DIR", raising=False)
    first = hold("runs/x")
    with locked_directory(RunOptions(name="x")) as (run, _):
        assert str(run.path) == "runs/x-2"
    first.kill()
    first.wait()
    with locked_directory(RunOptions(name="x")) as (run, _):
        assert str(run.path) == "runs/x"
    assert not (tmp_path / "runs" / "x-2").exists()


def test_an_output_within_a_run_is_locked_with_it(hold, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    hold(tmp_path / "run")
    for output in ("run", "run/stock", "run/deep/er/report.html"):
        with pytest.raises(GateError, match="another process"), writing_to(tmp_path / output):
            pytest.fail("two at once")
    with writing_to(tmp_path / "elsewhere"):
        assert not (tmp_path / LOCK).exists()


COMMANDS = {
    "a new run": ["fit", "--config", "{config}", "--run_dir", "new"],
    "fit, resumed": ["fit", "--config", "{config}", "--run_dir", "{run}", "--existing", "resume"],
    "fit, overwriting": ["fit", "--config", "{config}", "--run_dir", "{run}", "--existing", "overwrite"],
    "compare": ["compare", "--config", "{config}", "--run_dir", "new"],
    "report": ["report", "{run}", "--output", "{run}/report.html"],
    "export": ["export", "{run}", "--format", "masked", "--output", "{run}/masked", "--measure", "[]"],
    "analyze": ["analyze", "{run}", "--run_dir", "new"],
    "sweep": ["sweep", "{sweep}", "--run_dir", "new", "--trials", "1"],
}
SWEEP = {
    "program": "training.fit",
    "method": "random",
    "metric": {"name": "select/accuracy", "goal": "maximize"},
    "parameters": {"model.price": {"min": 0.0, "max": 0.8}},
    "command": ["${env}", "python", "-m", "training.fit", "${args}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_writes_there_ends_with_one_sentence(name, hold, full_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(full_run[0], tmp_path / "run")
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    places = {"config": write_config(tmp_path), "run": str(run), "sweep": str(tmp_path / "sweep.yaml")}
    command, *given = [part.format(**places) for part in COMMANDS[name]]
    hold(tmp_path / "new" if "new" in given else run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert run_command(command, given) == 2
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if line.startswith("error:")] == error.splitlines()[-1:]
    assert "another process is at work in" in error
    assert "Traceback" not in error
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    if (tmp_path / "new").exists():
        assert [path.name for path in (tmp_path / "new").iterdir()] == [LOCK]


@pytest.mark.nightly
def test_a_run_that_was_killed_is_resumed_at_once(tmp_path):
    given = ["-m", "training.fit", "--config", write_config(tmp_path), "--run_dir", "run", "--model.finetune", "3000"]
    process = subprocess.Popen([sys.executable, *given], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "run" / LOCK).is_file():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "run" / LOCK).is_file()
    refuse_busy(tmp_path / "run")
