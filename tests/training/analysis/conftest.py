"""Runs that analyses read and none writes to."""

import pytest

from tests.training import runs
from training.fit import main as fit


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of a classifier with one and a half epochs of fine-tuning."""
    return _fitted(tmp_path_factory, "analysed", runs)


def _fitted(factory, name, task):
    def make(folder):
        arguments = ["--config", task.write_config(folder), "--run_dir", str(folder / "run"), "--model.finetune", "1.5"]
        assert fit(arguments) == 0

    return runs.shared_folder(factory, name, make) / "run"
