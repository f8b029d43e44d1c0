"""A checkpoint of another run is not taken for one of the run in whose directory it lies."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from gates.errors import GateError
from tests.training.runs import make_data, make_pruner, make_setup, write_config
from training.commands.table import run_command
from training.comparison.cache import identity_of_dense, run_inputs
from training.pruner.callbacks import CostInCheckpoints, DenseCheckpoint
from training.pruner.checkpoints import IDENTITY, check_identity, read_archive, read_checkpoint, write_checkpoint
from training.runs.directory import RunDirectory
from training.runs.resume import identity_of, noted_identity
from training.setup import make_trainer


def make_foreign(path):
    """The checkpoint becomes one of another run."""
    write_checkpoint(read_archive(path, mapped=False) | {IDENTITY: "0123456789abcdef"}, path)


@pytest.fixture
def run(full_run, tmp_path):
    return shutil.copytree(full_run[0], tmp_path / "run")


def commands(run, folder):
    """By name, what reads which checkpoint."""
    (folder / "finished.json").unlink(missing_ok=True)
    return {
        "resume": ["fit", "--config", write_config(folder), "--run_dir", str(run), "--compare", "full",
                   "--curve", "[0.5, 0.25]", "--existing", "resume", "--wandb.mode", "auto"],
        "export": ["export", str(run), "--format", "masked", "--output", str(folder / "out")],
        "refit": ["export", str(run), "--format", "masked", "--refit", "--output", str(folder / "out")],
        "export one": ["export", f"{run}/checkpoints/dense.ckpt", "--format", "masked", "--output", str(folder / "out")],
        "analyze": ["analyze", str(run), "--experiments", "ablate", "--run_dir", str(folder / "out")],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("resume", "final"), ("resume", "dense"), ("resume", "last"), ("export", "final"), ("refit", "dense"),
        ("export one", "dense"), ("analyze", "dense"),
    ],
)  # fmt: skip
def test_another_runs_checkpoint_is_refused_by_its_name(command, name, run, tmp_path, capsys):
    path = run / "checkpoints" / f"{name}.ckpt"
    make_foreign(path)
    (run / "finished.json").unlink()
    line = commands(run, tmp_path)[command]
    before = (run / "comparison.csv").read_bytes()
    assert run_command(line[0], line[1:]) == 2
    assert f"the checkpoint '{path}' is not of the run in " in capsys.readouterr().err
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
    assert (run / "comparison.csv").read_bytes() == before


def test_a_copied_run_keeps_its_checkpoints(run, tmp_path, capsys):
    """It is known by what it began with, wherever it lies."""
    line = commands(run, tmp_path)["export"]
    assert run_command(line[0], line[1:]) == 0, capsys.readouterr().err
    identity = noted_identity(RunDirectory(run))
    assert identity is not None
    for name in ("dense", "last", "final"):
        assert read_checkpoint(run / "checkpoints" / f"{name}.ckpt")[IDENTITY] == identity


def test_runs_that_differ_in_an_option_differ_in_identity():
    """Also in one that the dense model does not depend on."""
    setup, data, pruner = make_setup(), make_data(), make_pruner()
    dense = identity_of_dense(setup, pruner, data, processes=1)
    own = identity_of(run_inputs(setup, dense))
    assert identity_of(json.loads(json.dumps(run_inputs(setup, dense)))) == own  # as it is read again
    assert identity_of(run_inputs(replace(setup, model=replace(setup.model, budget=2)), dense)) != own
    assert identity_of(run_inputs(setup, {**dense, "seed": 1})) != own


def test_the_dense_checkpoint_that_a_run_takes_from_another_becomes_its_own(tmp_path):
    pruner, source = make_pruner(), tmp_path / "other" / "dense.ckpt"
    trainer = make_trainer(make_setup(), identity="other")
    trainer.strategy.connect(pruner)
    trainer.strategy.checkpoint_io.save_checkpoint({"state_dict": {"a": torch.arange(5)}}, source)
    trainer = make_trainer(make_setup(), identity="own")
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 16
    DenseCheckpoint(tmp_path / "dense.ckpt", str(source)).on_train_start(trainer, pruner)
    found = read_archive(tmp_path / "dense.ckpt")
    assert found[IDENTITY] == "own"
    assert found["state_dict"]["a"].tolist() == list(range(5))


def test_an_experiment_goes_on_from_its_own_checkpoint_alone(tmp_path):
    """The last one of another, put into the folder of one that is under way."""
    write_checkpoint({"cost": {"seconds": 2.0}, IDENTITY: "ab"}, tmp_path / "last.ckpt")
    assert CostInCheckpoints.read(tmp_path / "last.ckpt", "ab").seconds == 2.0
    with pytest.raises(GateError, match=r"last.ckpt' is not of the experiment that is made there"):
        CostInCheckpoints.read(tmp_path / "last.ckpt", "cd")


def test_a_checkpoint_without_identity_is_of_no_run_that_has_one(tmp_path):
    check_identity({}, tmp_path, None, "the run")
    with pytest.raises(GateError, match="is not of the run: it was written with other options"):
        check_identity({}, tmp_path, "ab", "the run")
