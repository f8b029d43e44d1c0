"""A disk that gets full during a run: one sentence, no file that is cut off, and the run can be resumed."""

import re

import pytest

from tests.training.runs import write_config
from tests.training.stops import fit


@pytest.mark.integration
def test_a_run_on_a_full_disk_ends_with_a_sentence_and_can_be_resumed(tmp_path):
    given = ["--config", write_config(tmp_path), "--run_dir", "run", "--compare", "none"]
    code, said = fit(given, tmp_path, file_size=60_000)
    assert code == 2
    assert re.fullmatch(r"error: 'run/experiments/\.\w+/\S+' cannot be written: .*--existing resume\n", said)
    assert list((tmp_path / "run").rglob("*.ckpt")) == []
    assert fit([*given, "--existing", "resume"], tmp_path) == (0, "")
