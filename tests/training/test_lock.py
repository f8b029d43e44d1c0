"""One command at a time writes into a run directory."""

import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from gates.errors import GateError
from tests.training.runs import write_config
from training.commands.table import run_command
from training.config import RunOptions
from training.runs.directory import LOCK, locked_directory, only_writer, refuse_busy, writing_to

HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def hold():
    """Lock directories, as another command does that is at work there."""
    with ExitStack() as held:

        def hold(folder):
            folder.mkdir(parents=True, exist_ok=True)
            return held.enter_context(FileLock(folder / LOCK))

        yield hold


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("training.runs.directory.WAIT", 0.2)


def test_the_second_writer_is_refused_and_the_lock_ends_with_its_process(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / LOCK)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(GateError, match="another process is at work"), only_writer(tmp_path):
            pytest.fail("two at once")
        with pytest.raises(GateError, match="another process is at work"):
            refuse_busy(tmp_path)
        holder.kill()
    refuse_busy(tmp_path)
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
    """Also while the first has written nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEAD_GATES_RUN_DIR", raising=False)
    hold(Path("runs/x"))
    with locked_directory(RunOptions(name="x")) as run:
        assert str(run.path) == "runs/x-2"
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
