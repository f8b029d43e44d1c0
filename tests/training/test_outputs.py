"""Files that a command was told to write, and that are something else."""

import os
from pathlib import Path

import pytest
import torch

from gates.errors import GateError
from training.commands.table import run_command
from training.comparison import grid
from training.pruner.checkpoints import read_checkpoint
from training.runs.directory import RunDirectory, check_output, check_output_folder
from training.runs.tracking import run_id


def test_only_what_the_command_has_written_is_replaced(tmp_path):
    page = tmp_path / "report.html"
    check_output(page, "<title>", "report")
    for content in (b"", b"<html><title>a"):
        page.write_bytes(content)
        check_output(page, "<title>", "report")
    page.write_bytes(b"notes of a year\xff")
    with pytest.raises(GateError, match="is there and is no report, so it is not replaced; give another name"):
        check_output(page, "<title>", "report")


@pytest.mark.parametrize("command", [["report", "run"], ["latency"]])
def test_devices_and_other_files_stay(command, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("notes of a year")
    for output, said in ((os.devnull, "no regular file"), (tmp_path, "a directory"), (tmp_path / "notes.txt", "is no")):
        assert run_command(command[0], [*command[1:], "--output", str(output)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "notes of a year"
    assert not os.path.isfile(os.devnull)


def test_a_folder_of_other_files_stays(tmp_path):
    """Also where they have the endings of the command's own."""
    check_output_folder(tmp_path / "new", ["a.txt"])
    check_output_folder(tmp_path, ["a.txt"])
    (tmp_path / "a.txt").touch()
    (tmp_path / ".a.txt.partial-1").touch()
    check_output_folder(tmp_path, ["a.txt", "scores.csv"])
    (tmp_path / "notes.txt").write_text("notes of a year")
    with pytest.raises(GateError, match=r"holds 'notes.txt', which this command does not write"):
        check_output_folder(tmp_path, ["a.txt", "scores.csv"])
    with pytest.raises(GateError, match="is no folder"):
        check_output_folder(tmp_path / "notes.txt", ["a.txt"])


@pytest.mark.parametrize("existing", ["overwrite", "resume"])
def test_a_comparison_is_not_replaced_by_a_run(existing, tmp_path):
    (tmp_path / "config.yaml").write_text("name: mine\n")
    (tmp_path / "experiments").mkdir()
    with pytest.raises(GateError, match=r"holds a comparison and no run|does not hold a run|has no config.yaml of a run"):
        RunDirectory.claim(str(tmp_path), "name", existing)
    for name in ("checkpoints", "masks", "plots"):
        (tmp_path / name).mkdir()
    RunDirectory.claim(str(tmp_path), "name", existing)


def test_a_directory_that_holds_something_is_not_taken(tmp_path):
    run, sweep, other = tmp_path / "run", tmp_path / "sweep", tmp_path / "other"
    for file in (run / "config.yaml", sweep / "sweep.yaml", other / "thesis.tex"):
        file.parent.mkdir()
        file.write_text("model: {}\ndata: {}\ntrainer: {}\n")
    with pytest.raises(GateError, match=r"already holds a run.*--existing resume.*--existing overwrite"):
        RunDirectory.claim(str(run), "name", "refuse")
    for folder in (sweep, other):
        for existing in ("refuse", "overwrite"):
            with pytest.raises(GateError, match="is not empty and does not hold a run"):
                RunDirectory.claim(str(folder), "name", existing)


def test_the_id_of_a_run_in_wandb_is_one(tmp_path):
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "run_id.txt").write_text("../../esc\n")
    with pytest.raises(GateError, match=r"run_id.txt' as the id of a run in W&B: it is damaged"):
        run_id(tmp_path)
    (tmp_path / "wandb" / "run_id.txt").unlink()
    assert run_id(tmp_path) == run_id(tmp_path)


def test_a_run_behind_a_link_is_not_removed(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    (run / "config.yaml").write_text("model: {}\ndata: {}\ntrainer: {}\n")
    link.symlink_to(run)
    with pytest.raises(GateError, match=f"is a symbolic link, and --existing overwrite would remove what lies in '{run}'"):
        RunDirectory.claim(str(link), "name", "overwrite")
    assert RunDirectory.claim(str(link), "name", "resume").resumes
    assert not RunDirectory.claim(str(run), "name", "overwrite").resumes


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch, capsys):
    def refused(path, *args, **more):
        raise PermissionError(13, "Permission denied", str(path))

    torch.save({}, tmp_path / "last.ckpt")
    for name in ("metrics.json", "comparison.csv", "verdict.md", "config.yaml"):
        (tmp_path / name).touch()
    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr("torch.load", refused)
    for more in ([], ["--verdict"]):
        assert run_command("summary", [str(tmp_path), *more]) == 2
        assert "cannot be read or written: Permission denied" in capsys.readouterr().err
    with pytest.raises(PermissionError):
        read_checkpoint(tmp_path / "last.ckpt")


def test_a_directory_of_somebody_elses_is_not_overwritten(tmp_path):
    """A file called config.yaml, or a folder called experiments, makes it none of ours."""
    (tmp_path / "config.yaml").write_text("site: mine\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(GateError, match="does not hold a run"):
        RunDirectory.claim(str(tmp_path), "name", "overwrite")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "first").write_text("text")
    with pytest.raises(GateError, match="holds something else than a comparison"), grid.locked_directory(str(tmp_path)):
        pytest.fail("it is taken")
