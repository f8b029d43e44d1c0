"""What a run that is resumed goes on with."""

import copy
import json
import shutil

import pytest
import yaml

from gates.errors import GateError
from tests.training.runs import write_config
from tests.training.stops import Moment, fit
from training.commands.table import run_command
from training.config import RunOptions
from training.data.synthetic import build_tokenizer, generate
from training.fit import main
from training.runs.directory import LOCK, RunDirectory
from training.runs.resume import (
    FREE_WHEN_RESUMED,
    RUN_INPUTS,
    check_same_inputs,
    check_same_options,
    checkpoint_of,
    note_inputs,
)

STEP = "training.pruner.module:HeadPruner.optimizer_step"


def resumed(folder, config):
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return RunDirectory(folder, resumes=True)


def leaves(content, *path):
    """Every option of a configuration, as the keys that lead to it."""
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *path, name)
        else:
            yield (*path, name)


@pytest.mark.integration
def test_every_option_that_is_not_free_is_compared(full_run, tmp_path):
    began = yaml.safe_load((full_run[0] / "config.yaml").read_text())
    free, compared = set(), set()
    for path in leaves(began):
        now = copy.deepcopy(began)
        place = now
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = "another"
        try:
            check_same_options(resumed(tmp_path, began), yaml.safe_dump(now))
            free.add(".".join(path))
        except GateError:
            compared.add(".".join(path))
    assert all(name.startswith(tuple(FREE_WHEN_RESUMED)) for name in free)
    assert compared >= {
        "seed", "model.budget", "model.retrain", "model.from_scratch.hidden_size", "data.class_path",
        "data.init_args.train_rows", "trainer.accelerator", "trainer.devices", "trainer.precision", "average_last", "patience",
    }  # fmt: skip
    assert free >= {"run_dir", "save_every", "wandb.mode", "trainer.enable_progress_bar", "compare", "curve"}


@pytest.mark.parametrize(
    ("began", "now", "is_refused"),
    [
        ("none", "posthoc", False),
        ("posthoc", "full", False),
        ("full", "full", False),
        ("posthoc", "none", True),
        ("full", "none", True),
    ],
)
def test_a_comparison_is_not_replaced_by_a_shorter_one(tmp_path, began, now, is_refused):
    """As a resumed run without ``--compare`` would do."""
    run = resumed(tmp_path, {"compare": began})
    if not is_refused:
        check_same_options(run, yaml.safe_dump({"compare": now}))
        return
    with pytest.raises(GateError, match=f"by the shorter one of --compare {now}; give --compare {began}, or another --run_dir"):
        check_same_options(run, yaml.safe_dump({"compare": now}))


@pytest.mark.parametrize(("began", "now"), [(1, 1.0), (True, 1), ({"encoder": 1}, {"encoder": 1.0})])
def test_equal_values_of_other_types_are_other_options(began, now, tmp_path):
    """A budget of 1 is one head, and of 1.0 all of them."""
    with pytest.raises(GateError, match=r"model\.budget was .* and is .* now"):
        check_same_options(resumed(tmp_path, {"model": {"budget": began}}), yaml.safe_dump({"model": {"budget": now}}))
    check_same_options(resumed(tmp_path, {"model": {"budget": began}}), yaml.safe_dump({"model": {"budget": began}}))


@pytest.mark.parametrize(("began", "now"), [(None, "other.ckpt"), ("other.ckpt", None), ("other.ckpt", "third.ckpt")])
def test_a_run_is_not_resumed_from_another_checkpoint(began, now, tmp_path):
    run = resumed(tmp_path, {"ckpt_path": began})
    with pytest.raises(GateError, match=r"ckpt_path was .* now"):
        checkpoint_of(RunOptions(ckpt_path=now), run)
    assert checkpoint_of(RunOptions(ckpt_path=began), run) == began
    (tmp_path / RUN_INPUTS).touch()  # files of its data are in its own directory
    assert checkpoint_of(RunOptions(ckpt_path=began), run) == str(run.checkpoint("dense"))


def test_inputs_of_a_run_are_noted_when_it_begins_and_compared_when_it_goes_on(tmp_path):
    began = {"data": "a", "weights": "b", "processes": 2, "trainer": {"precision": None}}
    note_inputs(RunDirectory(tmp_path), began)
    assert json.loads((tmp_path / RUN_INPUTS).read_text()) == began
    goes_on = RunDirectory(tmp_path, resumes=True)
    check_same_inputs(goes_on, began)
    for changed, named in (
        ({"data": "c"}, "data"),
        ({"weights": "c"}, "first weights"),
        ({"processes": 1}, "number of processes"),
    ):
        with pytest.raises(GateError, match=f"has changed since: its .*{named}"):
            check_same_inputs(goes_on, began | changed)
    assert json.loads((tmp_path / RUN_INPUTS).read_text()) == began
    (tmp_path / RUN_INPUTS).unlink()  # a run that was stopped before it wrote them
    check_same_inputs(goes_on, began)
    note_inputs(goes_on, began)
    note_inputs(goes_on, {"data": "another"})  # what is noted stays
    assert json.loads((tmp_path / RUN_INPUTS).read_text()) == began


class Stopped(BaseException):
    """As a process that is killed: nothing is caught on the way."""


def stop_between_tables(monkeypatch):
    """Whoever writes tables gets no further than the first of a comparison."""
    write, written = RunDirectory.write_table, []

    def stopping(run, name, table):
        if "comparison.csv" in written:
            raise Stopped
        written.append(name)
        write(run, name, table)

    monkeypatch.setattr(RunDirectory, "write_table", stopping)


@pytest.mark.integration
def test_a_run_that_is_stopped_between_its_tables_is_not_taken_for_finished(full_run, tmp_path, monkeypatch, capsys):
    """Though all of an earlier comparison's are there."""
    run = shutil.copytree(full_run[0], tmp_path / "run")
    arguments = ["--config", write_config(tmp_path), "--run_dir", str(run), "--compare", "full", "--curve", "[0.75]"]
    with monkeypatch.context() as patch:
        stop_between_tables(patch)
        with pytest.raises(Stopped):
            main([*arguments, "--existing", "resume"])
    assert run_command("export", [str(run), "--format", "masked", "--output", str(tmp_path / "out")]) == 2
    assert "has not ended: it has no metrics.json; continue it" in capsys.readouterr().err
    assert run_command("summary", [str(run)]) == 2
    assert "does not hold a finished run" in capsys.readouterr().err
    assert main([*arguments, "--existing", "resume"]) == 0
    assert run_command("summary", [str(run)]) == 0


def contents(folder):
    """Every file below a folder but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.nightly
def test_a_stopped_run_does_not_go_on_with_other_data(tmp_path):
    """Files may change under the same name."""
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    given = ["--config", write_config(tmp_path), "--run_dir", "run", "--data", "Text", "--data.tokenizer", "tokenizer"]
    for seed, name in enumerate(("train", "test")):
        rows = [f"{row['text']}\t{row['label']}" for row in generate(64, seed=seed)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
        given += [f"--data.{name}_file", f"{name}.tsv"]
    code, said = fit(given, tmp_path, Moment(STEP, 6))
    assert code < 0, said
    whole = (tmp_path / "train.tsv").read_text()
    rows = whole.splitlines()
    (tmp_path / "train.tsv").write_text("\n".join([*rows[:-1], rows[1]]) + "\n")
    before = contents(tmp_path / "run")
    code, said = fit([*given, "--existing", "resume", "--compare", "posthoc"], tmp_path)
    assert code == 2
    assert "has changed since: its data (their content)" in said
    assert contents(tmp_path / "run") == before  # its configuration among them
    (tmp_path / "train.tsv").write_text(whole)
    assert fit([*given, "--existing", "resume"], tmp_path) == (0, "")


@pytest.mark.integration
def test_a_comparison_that_is_stopped_between_its_tables_is_not_taken_for_finished(compared, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(compared[0], tmp_path / "run")
    began = (run / "config.yaml").read_text()
    given = ["--config", compared[1], "--run_dir", str(run), "--methods", "learned,his", "--budgets", "3", "--seeds", "0"]
    with monkeypatch.context() as patch:
        patch.setattr("training.comparison.grid.run_seed", lambda *args: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            run_command("compare", given)
    assert (run / "config.yaml").read_text() == began  # that of the tables, which are still there
    with monkeypatch.context() as patch:
        stop_between_tables(patch)
        with pytest.raises(Stopped):
            run_command("compare", given)
    assert run_command("summary", [str(run)]) == 2
    assert "does not hold a finished run" in capsys.readouterr().err
    assert run_command("compare", given) == 0
    assert (run / "config.yaml").read_text() != began
    assert json.loads((run / "metrics.json").read_text())["methods"] == ["learned", "his"]


def test_what_killed_processes_left_in_a_run_goes_when_it_goes_on(tmp_path):
    """Whatever number their process had, which another may have now: nobody else writes there."""
    run = RunDirectory(tmp_path)
    run.create("name: x\n")
    lasting = tmp_path / "checkpoints" / "dense.ckpt"
    lasting.touch()
    for left in (".metrics.json.partial-1", "checkpoints/.dense.ckpt.partial-1", "plots/.a.png.partial-1"):
        (tmp_path / left).touch()
    (tmp_path / ".export.partial-1" / "more").mkdir(parents=True)
    RunDirectory(tmp_path, resumes=True).create("name: x\n")
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]
    assert lasting.is_file()
