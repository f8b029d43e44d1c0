"""The model and the data of a finished run, loaded again."""

import pytest

from gates.errors import GateError
from tests.training import translation_runs
from tests.training.local_text_runs import make_run, write_texts
from training.analysis.model import load_run
from training.fit import main as fit


@pytest.mark.integration
def test_data_that_changed_or_went_are_said_and_others_can_be_named(tmp_path):
    """Other texts leave the run its vocabulary, without which its weights mean nothing."""
    run, other = str(make_run(tmp_path)), write_texts(tmp_path, "other", "three three one two two")
    vocabulary = load_run(run).data.tokenizer.get_vocab()
    named = ["--data.train_file", str(other), "--data.select_file", str(other), "--data.test_file", str(other)]
    assert load_run(run, named).data.tokenizer.get_vocab() == vocabulary
    write_texts(tmp_path, "own", "one two two")
    harmless = ["--trainer.accelerator", "cpu", "--data.num_workers", "1"]
    for options in ([], harmless):
        with pytest.raises(GateError, match=r"have changed since the run .* --data.train_file FILE"):
            load_run(run, options)
    (tmp_path / "own.txt").unlink()
    with pytest.raises(GateError, match=r"own.txt' does not exist.*; config.yaml of the run in .*"):
        load_run(run, harmless)
    load_run(run, named)


@pytest.mark.nightly
def test_unchanged_data_of_a_translator_are_taken(tmp_path):
    assert fit(["--config", translation_runs.write_config(tmp_path), "--run_dir", str(tmp_path / "run")]) == 0
    assert load_run(str(tmp_path / "run")).data.fingerprint()
