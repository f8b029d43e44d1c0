"""Logging to W&B without ever asking a question: online when logged in, offline otherwise."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import wandb
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.utilities import rank_zero_only

from gates.errors import GateError
from gates.files import replacing
from training.config import WandbOptions

PACKAGES = (
    "torch",
    "pytorch-lightning",
    "transformers",
    "torchmetrics",
    "datasets",
    "safetensors",
    "tokenizers",
    "sacrebleu",
    "wandb",
)


def resolved_mode(options: WandbOptions) -> Literal["online", "offline", "disabled"]:
    """``online``, ``offline`` or ``disabled``, decided without a prompt."""
    if options.mode != "auto":
        return options.mode
    match os.environ.get("WANDB_MODE", "").lower():
        case "online":
            return "online"
        case "offline" | "dryrun":
            return "offline"
        case "disabled":
            return "disabled"
    with environment_of_wandb():
        return "online" if wandb.login(prompt=False) else "offline"


@contextmanager
def environment_of_wandb() -> Iterator[None]:
    """W&B's complaints about its environment variables as one sentence; empty ones are as if they were not set.

    Raises:
        GateError: naming the variable.
    """
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]
    try:
        yield
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        name = f"WANDB_{str(wrong['loc'][0]).upper()}" if wrong["loc"] else "a setting"
        raise GateError(f"W&B does not take {name}={wrong['input']!r} ({wrong['msg']}); correct or unset it") from error


def make_logger(options: WandbOptions, run_path: Path, config: dict[str, Any]) -> WandbLogger | None:
    """A Lightning logger whose files lie in ``run_path/wandb``; None if disabled.

    A run that is resumed goes on in W&B under the id it began with.
    """
    if resolved_mode(options) == "disabled":
        return None
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return WandbLogger(save_dir=str(run_path), project=options.project)  # never asked for a run
    name = options.name or run_path.name
    started = start(options, run_path, id=run_id(run_path), name=name, group=options.group, config=config)
    assert started is not None
    started.define_metric("trainer/global_step")
    started.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    # Lightning's own start passes a setting that W&B has given up, and is warned.
    return WandbLogger(save_dir=str(run_path), project=options.project, experiment=started)


def start(options: WandbOptions, run_path: Path, *, config: Mapping[str, Any], **described: Any) -> wandb.Run | None:
    """A run in W&B whose files lie in ``run_path/wandb``; None if disabled.

    Args:
        options: how it appears.
        run_path: the run directory.
        config: what the run was told.
        described: ``id``, ``name``, ``group``, ``job_type`` and the like, as ``wandb.init`` takes them.
    """
    mode = resolved_mode(options)
    if mode == "disabled":
        return None
    with environment_of_wandb():
        os.environ.setdefault("WANDB_SILENT", "true")
        return wandb.init(
            dir=str(run_path),
            project=options.project,
            tags=options.tags,
            config={**config, "code": code_version()},
            mode=mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
            **described,
        )


def run_id(run_path: Path) -> str:
    """W&B's id of the run in this directory, made when it is first asked for."""
    file = run_path / "wandb" / "run_id.txt"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as partial:
            partial.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
    return file.read_text().strip()


def versions() -> dict[str, str]:
    """Versions of what results depend on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def machine() -> dict[str, str | int]:
    """The processor and the accelerator, if there is one."""
    described: dict[str, str | int] = {"platform": platform.machine(), "cpu_cores": os.cpu_count() or 1}
    described["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    return described


def code_version() -> dict[str, str]:
    """The package's version and, in a git checkout, the commit."""
    described: dict[str, str] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        described["version"] = metadata.version("head-gates")
    if not (Path(__file__).parents[2] / ".git").exists():
        return described
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        described["commit"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return described
