"""Runs that many tests read and none writes to."""

from contextlib import ExitStack, redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from tests.training.runs import shared_folder, write_config
from training.commands.table import run_command
from training.comparison.methods import RIVALS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What reads a shared run is an integration test: the run is made for it."""
    for item in items:
        if {"full_run", "compared"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def full_run(tmp_path_factory):
    """One full run, compared, exported and logged to W&B offline; what it said."""

    def make(folder):
        arguments = ["--config", write_config(folder), "--run_dir", "run", "--compare", "full", "--wandb.mode", "auto"]
        with pytest.MonkeyPatch.context() as patch, ExitStack() as said:
            patch.chdir(folder)
            patch.setenv("WANDB_MODE", "offline")
            for name, redirected in (("stdout", redirect_stdout), ("stderr", redirect_stderr)):
                said.enter_context(redirected(said.enter_context((folder / name).open("w"))))
            code = run_command("fit", [*arguments, "--curve", "[0.5, 0.25]"])
        assert code == 0, (folder / "stderr").read_text()

    folder = shared_folder(tmp_path_factory, "full", make)
    return folder / "run", SimpleNamespace(**{name: (folder / name).read_text() for name in ("stdout", "stderr")})


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The same by ``python -m training compare``: a directory with the comparison in ``run``, and its configuration."""

    def make(folder):
        methods = ",".join(["learned", *RIVALS])
        arguments = ["--config", write_config(folder), "--run_dir", str(folder / "run"), "--methods", methods]
        arguments += ["--budgets", "3", "--seeds", "0", "--stages", "post hoc,retrained"]  # of a run without a refit
        assert run_command("compare", arguments) == 0

    folder = shared_folder(tmp_path_factory, "compared", make)
    return folder / "run", str(folder / "tiny.yaml")
