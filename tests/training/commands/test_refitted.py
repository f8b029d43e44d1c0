"""A finished run's dense weights refitted to a mask, as the command ``export`` does it."""

import re
import shutil

import pandas as pd
import pytest

from gates.errors import GateError
from tests.training.local_text_runs import make_run
from tests.training.runs import make_options, write_config
from training.commands import export
from training.commands.table import run_command
from training.fit import main as fit
from training.scoring import refits


@pytest.mark.integration
def test_the_number_that_is_said_is_of_the_refit(tmp_path, capsys, monkeypatch):
    """Also where less is better: of the perplexities the least one."""
    run, found = make_run(tmp_path), []
    moved = str(shutil.move(tmp_path / "own.txt", tmp_path / "moved.txt"))
    refit = export.refitted_to
    monkeypatch.setattr(export, "refitted_to", lambda *given: found.append(refit(*given)) or found[-1])
    arguments = [str(run), "--format", "pruned", "--ranking", "obs", "--budget", "2", "--refit"]
    files = [part for split in ("train", "select", "test") for part in (f"--data.{split}_file", moved)]
    assert run_command("export", [*arguments, "--output", str(tmp_path / "out"), "--", *files]) == 0
    ((_, refitted, _),) = found
    said = r"perplexity on the selection split (\S+) \(dense (\S+)\)"
    found_in = capsys.readouterr().out
    reached, dense = re.search(rf"dense weights refitted to \d heads of obs: {said}, ", found_in).groups()
    assert reached == f"{refitted.reached:.2f}"
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert re.search(said, card).groups() == (reached, dense)
    assert "with data given at the export (--data.train_file, --data.select_file, --data.test_file)" in card
    tuned = pd.read_csv(run / "metrics.csv").query("epoch == 1")["select/perplexity"].dropna()  # the end of fine-tuning
    assert dense == f"{tuned.item():.2f}"
    assert run_command("export", [*arguments[:3], "--output", str(tmp_path / "own"), "--", *files]) == 2
    assert "'--data.train_file' behind -- is for the run's data, which this export does not read" in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ["encoder.layer.0"]}, "freeze or freeze_while_pruning fixes weights that a refit changes"),
        (
            {"dtype": "bfloat16", "backbone": "a/b", "from_scratch": None, "finetune": 0, "retrain": 0},
            "dtype is bfloat16, in which weights are fixed, but a refit changes weights",
        ),
    ],
)
def test_weights_that_a_run_fixed_are_not_refitted(options, message):
    assert make_options(**options).why_not_refitted == message
    assert not make_options(**options, refit=True).refits


@pytest.mark.integration
@pytest.mark.parametrize(("budget", "said"), [("2", "the run continues"), ("auto", "the budget is searched")])
def test_a_run_whose_weights_cannot_be_refitted_goes_on(tmp_path, capsys, monkeypatch, budget, said):
    def fails(*_):
        raise GateError("two projections share weights")

    monkeypatch.setattr(refits, "refit", fails)
    options = ["--model.budget", budget, "--model.refit", "true", "--compare", "none", "--curve", "[]"]
    more = ["--model.max_loss", "99"] if budget == "auto" else []
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), *options, *more]) == 0
    assert f"{said} without a refit: two projections share weights" in " ".join(capsys.readouterr().out.split())
    rows = pd.read_csv(tmp_path / "run" / "comparison.csv")
    assert set(rows["method"]) == {"dense", "learned"}
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


@pytest.mark.integration
def test_what_is_impossible_is_said_before_anything_is_scored_or_refitted(full_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "refitted_to", None)
    monkeypatch.setattr(export, "Scores", None)

    def refused(*more):
        assert run_command("export", [str(full_run[0]), "--output", str(tmp_path / "out"), "--refit", *more]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "no stock form with fewer heads" in refused("--format", "stock", "--ranking", "obs", "--budget", "2")
    more = ("--ranking", "obs", "--budget", "2", "--minimum_per_layer", "2")
    assert "minimum of 2" in refused("--format", "masked", *more)
    assert "'--model.budget' behind -- does not say where something is; expected one of --data," in refused(
        "--budget", "2", "--", "--model.budget", "4"
    )


@pytest.mark.integration
def test_gates_of_a_run_that_pruned_nothing_rank_no_heads(tmp_path, capsys):
    dense = ["--model.prune", "0", "--model.retrain", "0", "--model.budget", "null", "--compare", "none"]
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), *dense]) == 0
    arguments = [str(tmp_path / "run"), "--format", "pruned", "--measure", "[]"]
    assert run_command("export", [*arguments, "--budget", "3", "--output", str(tmp_path / "three")]) == 2
    assert "this run pruned nothing, so its gates rank no heads; give --ranking" in capsys.readouterr().err
    assert run_command("export", [*arguments, "--budget", "8", "--output", str(tmp_path / "all")]) == 0
    by_obs = [*arguments, "--budget", "3", "--ranking", "obs", "--refit", "--output", str(tmp_path / "by-obs")]
    assert run_command("export", by_obs) == 0
