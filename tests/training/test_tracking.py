"""W&B's environment variables, and W&B without a network."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import wandb

from gates.errors import GateError
from tests.training.runs import write_config
from training.commands.table import run_command
from training.config import WandbOptions
from training.runs import tracking


@pytest.fixture(autouse=True)
def reads_its_environment():
    """W&B reads its variables once in a process, unless it is told to forget."""
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.integration
def test_empty_variables_are_as_if_they_were_not_set(tmp_path, monkeypatch):
    for name in ("WANDB_SILENT", "WANDB_CONSOLE", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert tracking.resolved_mode(WandbOptions()) == "offline"
    run = tracking.start(WandbOptions(mode="offline"), tmp_path, config={}, id="first")
    run.finish()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


def test_a_variable_that_wandb_does_not_take_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_CONSOLE", "loud")
    with pytest.raises(
        GateError, match=r"^W&B does not take WANDB_CONSOLE='loud' \(Input should be .*\); correct or unset it$"
    ):
        tracking.start(WandbOptions(mode="offline"), tmp_path, config={}, id="first")


KEY = "0123456789" * 4
NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def no_network(monkeypatch):
    """A key, and a server that does not answer."""
    for name, value in {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": NOBODY}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_a_key_without_a_network_makes_an_offline_run_and_one_line(no_network, capfd):
    assert tracking.reachable(WandbOptions()).mode == "offline"
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == (
        f"warning: W&B cannot be reached at {NOBODY} ([Errno 111] Connection refused); the log is kept here, and wandb "
        "sync sends it later\n"
    )


def test_modes_that_need_no_network_ask_for_none(no_network, monkeypatch):
    monkeypatch.setattr(tracking, "no_answer_of", lambda *arguments: pytest.fail("asked"))
    assert [tracking.reachable(WandbOptions(mode=mode)).mode for mode in ("offline", "disabled")] == ["offline", "disabled"]
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert tracking.reachable(WandbOptions()).mode == "offline"


class Refusing(BaseHTTPRequestHandler):
    """A server that answers, and lets nobody in."""

    def answer(self):
        self.send_error(401)

    do_GET = do_POST = answer  # noqa: N815 (the names that it is called by)

    def log_message(self, *arguments):
        pass


def test_a_server_that_refuses_is_there():
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert tracking.no_answer_of(address, {}) is None
        server.shutdown()
    assert "refused" in tracking.no_answer_of(address, {})


@pytest.mark.parametrize("command", ["fit", "sweep"])
def test_it_is_found_out_before_there_is_anything_to_lose(command, no_network, tmp_path, capfd):
    config = write_config(tmp_path)
    given = ["--config", config, "--run_dir", str(tmp_path / "run"), "--wandb.mode", "online"]
    if command == "sweep":
        given = [write_sweep(tmp_path), "--run_dir", str(tmp_path / "run"), "--", "--config", config, "--wandb.mode", "online"]
    assert run_command(command, given) == 2
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"error: W&B cannot be reached at {NOBODY}")
    assert not (tmp_path / "run").exists()


def write_sweep(folder):
    (folder / "sweep.yaml").write_text(
        "method: grid\nmetric: {name: select/accuracy, goal: maximize}\nparameters: {seed: {values: [0, 1]}}\n"
        "command: ['${env}', '${interpreter}', -m, training.fit, '${args}']\n"
    )
    return str(folder / "sweep.yaml")


@pytest.mark.nightly
def test_a_server_that_goes_away_later_costs_one_line(no_network, tmp_path, capfd):
    run = tracking.start(WandbOptions(mode="online"), tmp_path, config={}, id="first")
    assert run.offline
    run.finish()
    said = capfd.readouterr().err
    assert said.startswith("warning: W&B does not take this run (")
    assert said.count("\n") == 1


ASKS_NOBODY = """
import sys, urllib.request
from contextlib import suppress
from pathlib import Path
from training.config import WandbOptions
from training.runs.tracking import reachable, start
run = start(reachable(WandbOptions()), Path(sys.argv[1]), config={}, id="first")
run.log({"loss": 1.0})
run.finish()
with suppress(OSError):
    urllib.request.urlopen("http://the-end.invalid/")
"""


class Proxy(BaseHTTPRequestHandler):
    """Takes down which servers are asked for, and answers for none."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_error(502)

    do_POST = do_PUT = do_CONNECT = do_GET  # noqa: N815

    def log_message(self, *arguments):
        pass


@pytest.mark.nightly
def test_an_offline_run_asks_for_no_server(tmp_path):
    """W&B's client looks for a server of its own reports by default. The last request shows that the proxy is watched."""
    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        proxy.asked = []
        Thread(target=proxy.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{proxy.server_port}"
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith("WANDB_") and "proxy" not in name.lower()
        }
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), address)
        done = subprocess.run(
            [sys.executable, "-c", ASKS_NOBODY, str(tmp_path)],
            capture_output=True,
            text=True,
            env=kept | proxies | {"WANDB_MODE": "offline"},
        )
        proxy.shutdown()
    assert done.returncode == 0
    assert proxy.asked == ["http://the-end.invalid/"]


BEGINS_A_RUN = """
from pathlib import Path
from training.config import WandbOptions
from training.runs.tracking import start
start(WandbOptions(mode="offline"), Path("run"), config={}, id="child").finish()
"""


@pytest.mark.integration
def test_a_run_that_a_process_with_wandb_begins_elsewhere_has_its_files(tmp_path):
    """The child uses the service of its parent's client, whose working directory is another."""
    parent = tracking.start(WandbOptions(mode="offline"), tmp_path / "parent", config={}, id="parent")
    (tmp_path / "elsewhere").mkdir()
    subprocess.run([sys.executable, "-c", BEGINS_A_RUN], check=True, cwd=tmp_path / "elsewhere", env=os.environ)
    parent.finish()
    assert len(list((tmp_path / "elsewhere" / "run" / "wandb").glob("offline-run-*/*.wandb"))) == 1


@pytest.mark.parametrize("home", ["file", "missing"])
def test_without_a_home_directory_folders_of_wandb_are_in_the_run(home, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / home))
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.delenv(f"WANDB_{name}_DIR", raising=False)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "own"))
    with tracking.environment_of_wandb(tmp_path / "run"):
        folders = {name: os.environ[f"WANDB_{name}_DIR"] for name in ("CACHE", "CONFIG", "DATA")}
    inside = tmp_path / "run" / "wandb"
    assert folders == {"CACHE": str(inside / "cache"), "CONFIG": str(tmp_path / "own"), "DATA": str(inside / "data")}


@pytest.mark.integration
@pytest.mark.parametrize("command", ["fit", "compare"])
def test_results_that_wandb_does_not_take_are_still_written(command, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise PermissionError(13, "Permission denied", "/nonexistent")

    module, name = {"fit": ("run", "send_run"), "compare": ("grid", "send_comparison")}[command]
    monkeypatch.setattr(f"training.comparison.{module}.{name}", fails)
    run = tmp_path / "run"
    arguments = ["--config", write_config(tmp_path), "--run_dir", str(run), "--wandb.mode", "offline"]
    arguments += ["--methods", "his", "--budgets", "3", "--seeds", "0", "--stages", "post hoc"] if command == "compare" else []
    assert run_command(command, arguments) == 0
    assert (run / ("finished.json" if command == "fit" else "report.html")).is_file()
    assert "warning: W&B did not get all results ([Errno 13] Permission denied" in capsys.readouterr().err
