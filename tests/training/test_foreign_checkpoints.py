"""A checkpoint of another run is not taken for one of the run in whose directory it lies."""

import json
import shutil
from dataclasses import replace

import pytest

from gates.errors import GateError
from tests.training.runs import make_data, make_pruner, make_setup
from training.commands.table import run_command
from training.comparison.cache import identity_of_dense, run_inputs
from training.pruner.checkpoints import IDENTITY, check_identity, read_archive, write_checkpoint
from training.runs.resume import identity_of


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
        "export": ["export", str(run), "--format", "masked", "--output", str(folder / "out")],
        "refit": ["export", str(run), "--format", "masked", "--refit", "--output", str(folder / "out")],
        "analyze": ["analyze", str(run), "--experiments", "ablate", "--run_dir", str(folder / "out")],
    }  # fmt: skip


@pytest.mark.parametrize(("command", "name"), [("export", "final"), ("refit", "dense"), ("analyze", "dense")])
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


def test_runs_that_differ_in_an_option_differ_in_identity():
    """Also in one that the dense model does not depend on."""
    setup, data, pruner = make_setup(), make_data(), make_pruner()
    dense = identity_of_dense(setup, pruner, data, processes=1)
    own = identity_of(run_inputs(setup, dense))
    assert identity_of(json.loads(json.dumps(run_inputs(setup, dense)))) == own  # as it is read again
    assert identity_of(run_inputs(replace(setup, model=replace(setup.model, budget=2)), dense)) != own
    assert identity_of(run_inputs(setup, {**dense, "seed": 1})) != own


def test_a_checkpoint_without_identity_is_of_no_run_that_has_one(tmp_path):
    check_identity({}, tmp_path, None, "the run")
    with pytest.raises(GateError, match="is not of the run: it was written with other options"):
        check_identity({}, tmp_path, "ab", "the run")
