"""Runs that many tests read and none writes to."""

from types import SimpleNamespace

import pytest

from tests.training.runs import run_fit, shared_folder, write_config
from training.commands.table import run_command
from training.comparison.methods import RIVALS


@pytest.fixture(scope="session")
def full_run(tmp_path_factory):
    """One full run, compared, exported and logged to W&B offline, in a process of its own; what it said."""

    def make(folder):
        arguments = ["--config", write_config(folder), "--run_dir", "run", "--compare", "full", "--wandb.mode", "auto"]
        done = run_fit(*arguments, "--curve", "[0.5, 0.25]", cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        for name in ("stdout", "stderr"):
            (folder / name).write_text(getattr(done, name))

    folder = shared_folder(tmp_path_factory, "full", make)
    return folder / "run", SimpleNamespace(**{name: (folder / name).read_text() for name in ("stdout", "stderr")})


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The same by ``python -m training compare``: a directory with the comparison in ``run``, and its configuration."""

    def make(folder):
        methods = ",".join(["learned", *RIVALS])
        arguments = ["--config", write_config(folder), "--run_dir", str(folder / "run"), "--methods", methods]
        assert run_command("compare", [*arguments, "--budgets", "3", "--seeds", "0"]) == 0

    folder = shared_folder(tmp_path_factory, "compared", make)
    return folder / "run", str(folder / "tiny.yaml")
