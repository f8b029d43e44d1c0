"""Logging to W&B without prompts: online if the user is logged in and W&B answers, offline otherwise."""

from __future__ import annotations

import os
import platform
import re
import secrets
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError

import pydantic
import torch
import wandb
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from gates.errors import GateError, first_line
from gates.files import replacing
from training.config import WandbOptions
from training.runs.launched import is_first_process
from training.runs.stored import damaged, read_text

PACKAGES = (
    "torch", "pytorch-lightning", "transformers", "torchmetrics", "datasets", "safetensors", "tokenizers", "sacrebleu", "wandb",
)  # fmt: skip
Mode = Literal["online", "offline", "disabled"]


def reachable(options: WandbOptions) -> WandbOptions:
    """Return the options with a mode that works: with ``auto``, a server that does not answer makes the run offline."""
    mode = resolved_mode(options)
    if mode != "online" or not is_first_process(os.environ):
        return replace(options, mode=mode)
    with environment_of_wandb():
        reason = _why_not_online()
    if reason is None:
        return replace(options, mode="online")
    if options.mode == "online":
        raise GateError(f"{reason}; mend that, or use --wandb.mode offline")
    say_offline(reason)
    return replace(options, mode="offline")


def _why_not_online() -> str | None:
    settings = wandb.setup().settings
    if not wandb.login(prompt=False, verify=False):
        return "W&B has no key for you; use wandb login, or set WANDB_API_KEY"
    own = {"http": settings.http_proxy, "https": settings.https_proxy}
    proxies = urllib.request.getproxies() | {scheme: proxy for scheme, proxy in own.items() if proxy}
    if (silence := no_answer_of(settings.base_url, proxies)) is not None:
        return f"W&B cannot be reached at {settings.base_url} ({silence})"
    try:
        wandb.login(prompt=False)
    except wandb.errors.Error as error:
        return f"W&B does not let you in ({first_line(error).rstrip('.')})"
    return None


def no_answer_of(server: str, proxies: Mapping[str, str]) -> str | None:
    """Return why a server does not answer within 5 seconds, or None if it does, whatever it says."""
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler(dict(proxies))).open(server, timeout=5.0).close()
    except HTTPError:
        return None
    except URLError as error:
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)  # W&B may trust other certificates
    except (OSError, HTTPException, ValueError) as error:
        return first_line(error)
    return None


def say_offline(reason: str) -> None:
    print(f"warning: {reason}; the log is kept here, and wandb sync sends it later", file=sys.stderr)


def resolved_mode(options: WandbOptions) -> Mode:
    """Return the mode that the options, W&B's environment and its login lead to, without a prompt or the network."""
    if options.mode != "auto":
        return options.mode
    modes: dict[str, Mode] = {"online": "online", "offline": "offline", "dryrun": "offline", "disabled": "disabled"}
    if (stated := modes.get(os.environ.get("WANDB_MODE", "").lower())) is not None:
        return stated
    with environment_of_wandb():
        return "online" if wandb.login(prompt=False, verify=False) else "offline"


@contextmanager
def lost_in_wandb() -> Iterator[None]:
    """Warn if W&B refuses the results that a ``with`` block sends. The results on the disk stay complete."""
    try:
        yield
    except (OSError, wandb.errors.Error, GateError) as error:
        reason = first_line(error).rstrip(".")
        print(f"warning: W&B did not get all results ({reason}); those in the directory are complete", file=sys.stderr)


def has_home() -> bool:
    """Return whether there is a home directory that can be written to."""
    try:
        return Path.home().is_dir() and os.access(Path.home(), os.W_OK | os.X_OK)
    except RuntimeError:  # a user without an entry and without HOME
        return False


@contextmanager
def environment_of_wandb(run_path: Path | None = None) -> Iterator[None]:
    """Set up W&B's environment variables for a ``with`` block. Empty variables are removed, and the client reports nothing
    about itself.
    """
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]
    if run_path is not None and not has_home():
        for name in ("CACHE", "CONFIG", "DATA"):  # they hold staged artifacts, which wandb sync sends
            os.environ.setdefault(f"WANDB_{name}_DIR", str(run_path.absolute() / "wandb" / name.lower()))
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline runs would look up a server
    try:
        yield
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        name = f"WANDB_{str(wrong['loc'][0]).upper()}" if wrong["loc"] else "a setting"
        raise GateError(f"W&B does not take {name}={wrong['input']!r} ({wrong['msg']}); correct or unset it") from error


def make_logger(options: WandbOptions, run_path: Path, config: dict[str, Any]) -> WandbLogger | None:
    """Return a Lightning logger whose files lie in ``run_path/wandb``, or None if disabled. A resumed run keeps its id."""
    if resolved_mode(options) == "disabled":
        return None
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return WandbLogger(save_dir=str(run_path), project=options.project)  # it is never used for a run
    name = options.name or run_path.name
    started = start(options, run_path, id=run_id(run_path), name=name, group=options.group, config=config)
    assert started is not None
    started.define_metric("trainer/global_step")
    started.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    # Lightning's own start passes a deprecated setting.
    return WandbLogger(save_dir=str(run_path), project=options.project, experiment=started)


def start(options: WandbOptions, run_path: Path, *, config: Mapping[str, Any], **described: Any) -> wandb.Run | None:
    """Start a run in W&B whose files lie in ``run_path/wandb``; None if disabled. A server that no longer answers makes it an
    offline run.

    Args:
        described: ``id``, ``name``, ``group``, ``job_type`` and the like, as ``wandb.init`` takes them.
    """
    mode = resolved_mode(options)
    if mode == "disabled":
        return None
    with environment_of_wandb(run_path):

        def begin(mode: Mode) -> wandb.Run:
            return wandb.init(
                dir=str(run_path.absolute()),  # the client's service may be that of a parent process elsewhere
                project=options.project,
                tags=options.tags,
                config={**config, "code": code_version()},
                mode=mode,
                resume="allow",
                settings=wandb.Settings(silent=True, console="off"),
                **described,
            )

        try:
            return begin(mode)
        except wandb.errors.Error as error:
            if mode == "offline":
                raise GateError(f"W&B's client does not start ({first_line(error)}); use --wandb.mode disabled") from error
            say_offline(f"W&B does not take this run ({first_line(error)})")
            wandb.teardown()  # the client's service, which keeps the run's id for itself
            return begin("offline")


def run_id(run_path: Path) -> str:
    """Return W&B's id of the run in this directory. It is made at the first call."""
    file = run_path / "wandb" / "run_id.txt"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    stated = read_text(file, mend="delete it to begin a new run in W&B").strip()
    if not re.fullmatch(r"[\w-]{1,64}", stated, re.ASCII):
        raise damaged(file, "the id of a run in W&B", f"it holds {stated[:40]!r}", "delete it to begin a new run in W&B")
    return stated


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def machine() -> dict[str, str | int]:
    """Return the processor, and the GPU if there is one."""
    described: dict[str, str | int] = {"platform": platform.machine(), "cpu_cores": os.cpu_count() or 1}
    described["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def code_version() -> dict[str, str]:
    """Return the package's version and, in a git checkout, the commit."""
    described: dict[str, str] = {}
    with suppress(metadata.PackageNotFoundError):
        described["version"] = metadata.version("head-gates")
    if not (Path(__file__).parents[2] / ".git").exists():
        return described
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.CalledProcessError):
        described["commit"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return described
