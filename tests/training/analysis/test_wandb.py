"""Pictures of an analysis in W&B, read back from its own offline files."""

import pytest

from gates.errors import GateError
from tests.training.analysis.test_survival import HIS, LEARNED, write_roles, write_run
from tests.training.comparison.test_wandb import read_back
from training.analysis.wandb import tracking_of
from training.commands.table import run_command
from training.runs.tracking import run_id


def tracked(folder, wandb="{}"):
    rows = [("dense", 8, 0, [1] * 8), ("learned", 3, 0, LEARNED[0]), ("his", 3, 0, HIS[0])]
    run = write_run(folder, rows)
    (run / "config.yaml").write_text(f"wandb: {wandb}\n")
    return run


def survive(run, tmp_path):
    arguments = [str(run), "--experiments", "survival", "--roles", write_roles(tmp_path), "--run_dir", str(tmp_path / "out")]
    return run_command("analyze", arguments)


@pytest.mark.integration
def test_pictures_go_to_the_run_that_was_analysed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tracked(tmp_path / "run", "{name: shown, project: own}")
    identifier = run_id(run)
    assert survive(run, tmp_path) == 0
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    found, _, keys, _ = read_back(file)
    assert (found.run_id, found.display_name, found.project) == (identifier, "shown", "own")
    assert "analysis/survival" in keys
    assert list((run / "wandb").glob("offline-run-*/files/media/images/analysis/survival_*.png"))


@pytest.mark.parametrize("case", ["never tracked", "switched off"])
def test_nothing_is_sent_otherwise(case, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled" if case == "switched off" else "offline")
    run = tracked(tmp_path / "run")
    if case == "switched off":
        run_id(run)
    assert survive(run, tmp_path) == 0
    assert not list((run / "wandb").glob("offline-run-*"))


def test_a_damaged_configuration_is_told(tmp_path):
    run = tracked(tmp_path / "run", "{colour: green}")
    run_id(run)
    with pytest.raises(GateError, match="does not say how the run appears in W&B"):
        tracking_of(run)
