"""W&B's environment variables."""

import pytest
import wandb

from gates.errors import GateError
from training.config import WandbOptions
from training.runs import tracking


@pytest.fixture(autouse=True)
def reads_its_environment():
    """W&B reads its variables once in a process, unless it is told to forget."""
    wandb.teardown()
    yield
    wandb.teardown()


def test_empty_variables_are_as_if_they_were_not_set(tmp_path, monkeypatch):
    for name in ("WANDB_SILENT", "WANDB_CONSOLE", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert tracking.resolved_mode(WandbOptions()) == "offline"
    run = tracking.start(WandbOptions(mode="offline"), tmp_path, config={}, id="first")
    run.finish()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_a_variable_that_wandb_does_not_take_is_named(mode, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CONSOLE", "loud")
    with pytest.raises(
        GateError, match=r"^W&B does not take WANDB_CONSOLE='loud' \(Input should be .*\); correct or unset it$"
    ):
        tracking.start(WandbOptions(mode=mode), tmp_path, config={}, id="first")
