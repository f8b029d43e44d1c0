"""Pipes where files are expected, and other odd names: one sentence, and no waiting for what never comes."""

import os
import shutil
import signal

import pytest
import yaml

from gates.errors import GateError
from gates.export.safe_load import verify_checksums
from tests.training.runs import write_config
from tests.training.stops import Moment, fit
from training.commands.table import run_command
from training.comparison.cache import ExperimentCache
from training.runs.directory import LOCK, RunDirectory, only_writer, refuse_busy
from training.runs.resume import check_same_comparison
from training.runs.stored import check_unchanged

LONGEST = 1800
"""Seconds that no test here takes."""


@pytest.fixture(autouse=True)
def no_waiting():
    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_lock_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(GateError, match=r"\.lock' is no regular file, so it locks nothing; remove it"), only_writer(tmp_path):
        pass
    refuse_busy(tmp_path)


def test_checksums_that_are_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "checksums.json")
    with pytest.raises(GateError, match=r"checksums\.json' as text: it is damaged \(it is no regular file\)"):
        check_unchanged(tmp_path / "verdict.md", "text")
    with pytest.raises(GateError, match=r"checksums\.json' is not a regular file; copy the export again, or remove it"):
        verify_checksums(tmp_path)
    cache = ExperimentCache(tmp_path / "experiments")
    folder = cache.get_or_make({"a": 1}, lambda folder: {}).path
    (folder / "checksums.json").unlink()
    os.mkfifo(folder / "checksums.json")
    with pytest.raises(GateError, match=r"checksums\.json' as text: it is damaged \(it is no regular file\)"):
        ExperimentCache(tmp_path / "experiments").get({"a": 1})


@pytest.mark.parametrize("text", [True, False], ids=["text", "parallel text"])
def test_data_that_come_through_a_pipe(text, tmp_path, capsys):
    os.mkfifo(tmp_path / "a.tsv")
    sides = ("file",) if text else ("source", "target")
    names = [f"{split}_{side}" for split in ("train", "test") for side in sides]
    given = [part for name in names for part in (f"--data.{name}", str(tmp_path / "a.tsv"))]
    assert run_command("fit", [*given, "--model.backbone", "x", "--run_dir", str(tmp_path / "run")]) == 2
    assert f"the train file '{tmp_path}/a.tsv' is not a regular file but is read more than once" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_a_run_whose_directory_is_named_like_a_checkpoint(full_run, tmp_path, capsys):
    run = shutil.copytree(full_run[0], tmp_path / "x.ckpt")
    for more in ([], ["--refit"]):
        given = [str(run), "--format", "masked", "--output", str(tmp_path / f"out{len(more)}"), *more]
        assert run_command("export", given) == 0, capsys.readouterr().err
    assert run_command("export", [str(tmp_path / "y.ckpt"), "--format", "masked", "--output", str(tmp_path / "out")]) == 2
    assert "y.ckpt' does not exist" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("at", ["training.comparison.run:write_run", "training.pruner.module:HeadPruner.optimizer_step"])
def test_a_run_that_is_told_to_end_ends_as_after_ctrl_c(at, tmp_path):
    """As a scheduler tells it, while it trains and when it does not: its lock goes, and it says how to go on."""
    small = ["--data.train_rows", "64", "--data.select_rows", "32", "--data.test_rows", "32"]
    given = ["--config", write_config(tmp_path), "--run_dir", "run", *small]
    code, said = fit(given, tmp_path, Moment(at, 1 if "write_run" in at else 5), signal.SIGTERM)
    assert code == 130, said
    assert said.splitlines()[-1] == "stopped; continue with --existing resume"
    assert not (tmp_path / "run" / LOCK).exists()
    assert not list((tmp_path / "run").rglob("*.partial-*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"methods": "his"},
        {"seeds": "0,1"},
        {"swap": {"passes": 3.0}},
        {"restarts": {"count": 2}},
        {"name": "other"},
        {"save_every": 3},
    ],
)
def test_a_comparison_goes_on_with_other_methods_and_seeds(changes, tmp_path):
    began = {
        "methods": "learned",
        "seeds": "0",
        "name": "x",
        "save_every": 8,
        "model": {"finetune": 1.0},
        "swap": {"passes": 1.0},
        "restarts": {"count": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(began))
    (tmp_path / "metrics.json").write_text("{}")
    check_same_comparison(RunDirectory(tmp_path), yaml.safe_dump(began | changes))
    with pytest.raises(GateError, match=r"whose model\.finetune was 1\.0 and is 2\.0 now"):
        check_same_comparison(RunDirectory(tmp_path), yaml.safe_dump(began | changes | {"model": {"finetune": 2.0}}))
