"""A finished run's dense weights refitted to a mask, as the command ``export`` does it."""

import re
import shutil

import pandas as pd
import pytest

from tests.training import causal_runs
from tests.training.local_text_runs import make_run
from tests.training.runs import write_config
from training.commands import export
from training.commands import export as scored
from training.commands.table import run_command
from training.fit import main as fit


def test_the_number_that_is_said_is_of_the_ridge_that_was_taken(tmp_path, capsys, monkeypatch):
    """Also where less is better: of the perplexities the least one."""
    run, found = make_run(tmp_path), []
    moved = str(shutil.move(tmp_path / "own.txt", tmp_path / "moved.txt"))
    refit = export.refitted_to
    monkeypatch.setattr(export, "refitted_to", lambda *given: found.append(refit(*given)) or found[-1])
    arguments = [str(run), "--format", "remote-code", "--ranking", "obs", "--budget", "2", "--refit"]
    files = [part for split in ("train", "select", "test") for part in (f"--data.{split}_file", moved)]
    assert run_command("export", [*arguments, "--output", str(tmp_path / "out"), "--", *files]) == 0
    ((_, refitted, _),) = found
    assert len(set(refitted.tried)) > 1
    said = r"perplexity on the selection split (\S+) \(dense (\S+)\)"
    found_in = capsys.readouterr().out
    reached, dense, ridge = re.search(rf"refitted to \d heads: {said}, with ridge (\S+),", found_in).groups()
    assert (reached, ridge) == (f"{min(refitted.tried):.4f}", f"{refitted.ridge:g}")
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert re.search(said, card).groups() == (reached, dense)
    assert "with data given at the export (--data.train_file, --data.select_file, --data.test_file)" in card
    tuned = pd.read_csv(run / "metrics.csv").query("epoch == 1")["select/perplexity"].dropna()  # the end of fine-tuning
    assert dense == f"{tuned.item():.4f}"
    assert run_command("export", [*arguments[:3], "--output", str(tmp_path / "own"), "--", *files]) == 2
    assert "'--data.train_file' behind -- is for the run's data, which this export does not read" in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.freeze", "[encoder.layer.0]"], "refit changes all weights behind the heads, but freeze or"),
        (["--model.dtype", "bfloat16"], "dtype is bfloat16, in which weights are fixed, but refit changes them"),
    ],
)
def test_weights_that_a_run_fixed_are_not_refitted(tmp_path, capsys, options, message):
    if "bfloat16" in options:
        assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "first")]) == 0
        options = [
            *options,
            "--model.finetune",
            "0",
            "--model.retrain",
            "0",
            "--model.from_scratch",
            "null",
            "--model.backbone",
            str(tmp_path / "first" / "export"),
        ]
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), *options]) == 0
    arguments = [str(tmp_path / "run"), "--format", "remote-code", "--budget", "2", "--output", str(tmp_path / "out")]
    assert run_command("export", [*arguments, "--refit"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_impossible_is_said_before_anything_is_scored_or_refitted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export, "refitted_to", None)
    assert fit(["--config", causal_runs.write_config(tmp_path), "--run_dir", str(tmp_path / "run")]) == 0

    def refused(*more):
        given = [str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--refit", *more]
        assert run_command("export", given) == 2
        return capsys.readouterr().err

    assert "no stock class has a layer without heads" in refused("--format", "stock", "--ranking", "obs", "--budget", "1")
    monkeypatch.setattr(scored, "Scores", None)
    more = ("--ranking", "obs", "--budget", "2", "--minimum_per_layer", "2")
    assert "minimum of 2" in refused("--format", "masked", *more)
    assert "'--model.budget' behind -- does not say where something is; expected one of --data," in refused(
        "--budget", "2", "--", "--model.budget", "4"
    )


def test_a_stock_form_that_no_mask_has_is_refused_before_anything_is_scored(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scored, "Scores", None)
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run")]) == 0
    arguments = [str(tmp_path / "run"), "--format", "stock", "--ranking", "obs", "--budget", "2", "--refit"]
    assert run_command("export", [*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "whatever the mask" in capsys.readouterr().err


def test_gates_of_a_run_that_pruned_nothing_rank_no_heads(tmp_path, capsys):
    dense = ["--model.prune", "0", "--model.retrain", "0", "--model.budget", "null", "--compare", "none"]
    assert fit(["--config", write_config(tmp_path), "--run_dir", str(tmp_path / "run"), *dense]) == 0
    arguments = [str(tmp_path / "run"), "--format", "remote-code", "--measure", "[]"]
    assert run_command("export", [*arguments, "--budget", "3", "--output", str(tmp_path / "three")]) == 2
    assert "this run pruned nothing, so its gates rank no heads; give --ranking" in capsys.readouterr().err
    assert run_command("export", [*arguments, "--budget", "8", "--output", str(tmp_path / "all")]) == 0
    by_obs = [*arguments, "--budget", "3", "--ranking", "obs", "--refit", "--output", str(tmp_path / "by-obs")]
    assert run_command("export", by_obs) == 0
