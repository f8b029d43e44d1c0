"""The dense model and the data of a finished run, rebuilt."""

import pytest

from gates.errors import GateError
from tests.training import translation_runs
from tests.training.local_text_runs import make_run, write_texts
from training.analysis.model import load_dense
from training.fit import main as fit
from training.runs.directory import RunDirectory
from training.runs.resume import check_same_data


@pytest.mark.integration
def test_data_that_changed_or_went_are_said_and_others_can_be_named(tmp_path):
    """Other texts leave the run its vocabulary, without which its weights mean nothing."""
    run, other = str(make_run(tmp_path)), write_texts(tmp_path, "other", "three three one two two")
    vocabulary = load_dense(run).data.tokenizer.get_vocab()
    named = ["--data.train_file", str(other), "--data.select_file", str(other), "--data.test_file", str(other)]
    assert load_dense(run, named).data.tokenizer.get_vocab() == vocabulary
    write_texts(tmp_path, "own", "one two two")
    harmless = ["--trainer.accelerator", "cpu", "--data.num_workers", "1"]
    for options in ([], harmless):
        with pytest.raises(GateError, match=r"have changed since the run .* a lone --, as with --data.train_file FILE"):
            load_dense(run, options)
    load_dense(run, named)
    (tmp_path / "own.txt").unlink()
    for options in ([], harmless):
        with pytest.raises(GateError, match=r"own.txt' does not exist.*; config.yaml of the run in .* behind a lone -- take"):
            load_dense(run, options)
    load_dense(run, named)


def test_data_are_compared_with_what_the_run_noted(tmp_path):
    (tmp_path / "run_inputs.json").write_text('{"data": "before"}')
    check_same_data(RunDirectory(tmp_path), lambda: "before")
    with pytest.raises(GateError, match="have changed since"):
        check_same_data(RunDirectory(tmp_path), lambda: "now")


@pytest.mark.integration
def test_unchanged_data_are_taken(causal_run):
    assert load_dense(str(causal_run)).data.fingerprint()


@pytest.mark.nightly
def test_unchanged_data_of_a_translator_are_taken(tmp_path):
    assert fit(["--config", translation_runs.write_config(tmp_path), "--run_dir", str(tmp_path / "run")]) == 0
    assert load_dense(str(tmp_path / "run")).data.fingerprint()
