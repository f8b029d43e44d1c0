"""The dense model and the data of a finished run, rebuilt."""

import pytest

from gates.errors import GateError
from tests.training.local_text_runs import make_run, write_texts
from training.analysis.model import load_dense


def test_data_that_changed_or_went_are_said_and_others_can_be_named(tmp_path):
    """Other texts leave the run its vocabulary, without which its weights mean nothing."""
    run, other = str(make_run(tmp_path)), write_texts(tmp_path, "other", "three three one two two")
    vocabulary = load_dense(run).data.tokenizer.get_vocab()
    named = ["--data.train_file", str(other), "--data.select_file", str(other), "--data.test_file", str(other)]
    assert load_dense(run, named).data.tokenizer.get_vocab() == vocabulary
    write_texts(tmp_path, "own", "one two two")
    with pytest.raises(GateError, match=r"the data have changed since .* -- --data.train_file FILE"):
        load_dense(run)
    with pytest.raises(GateError, match="the data have changed"):
        load_dense(run, ["--trainer.accelerator", "cpu"])
    load_dense(run, named)
    (tmp_path / "own.txt").unlink()
    with pytest.raises(GateError, match=r"own.txt' does not exist.*; config.yaml of the run in .* -- --data.train_file FILE"):
        load_dense(run)
    load_dense(run, named)
