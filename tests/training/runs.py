"""Small runs for tests: a tiny Transformer on a small synthetic data set, through the real entry point."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from filelock import FileLock

from training.cli.command_line import build_parser
from training.config import PrunerOptions, Setup
from training.config.data import Synthetic
from training.data.synthetic import SyntheticData
from training.pruner.module import HeadPruner

MODEL = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
SETTINGS = {"learning_rate": 1e-3, "finetune": 1.0, "prune": 1.0, "retrain": 1.0, "budget": 3}
ROWS = {"train_rows": 256, "select_rows": 96, "test_rows": 96, "batch_size": 16, "score_rows": 64}
STEPS_PER_EPOCH = 16

CONFIG = """
name: tiny
model:
  from_scratch: {model_type: bert, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 32,
    max_position_embeddings: 64}
  budget: 3
  finetune: 1
  prune: 1
  retrain: 1
  learning_rate: 1.0e-3
  min_steps: 0
  refit: false
data:
  class_path: Synthetic
  init_args: {train_rows: 256, select_rows: 96, test_rows: 96, batch_size: 16, score_rows: 64}
trainer: {accelerator: cpu, enable_progress_bar: false, log_every_n_steps: 2}
wandb: {mode: disabled}
compare: none
save_every: 8
"""


def make_options(**settings: object) -> PrunerOptions:
    """Options of a small run; settings take the place of some of them."""
    return PrunerOptions(**({"from_scratch": MODEL} | SETTINGS | settings))


def make_pruner(*, seed: int = 0, **settings: object) -> HeadPruner:
    """A built pruner with reproducible weights."""
    torch.manual_seed(0)
    pruner = HeadPruner(make_options(**settings), seed=seed)
    data = make_data()
    pruner.build(data.task, data.tokenizer)
    return pruner


def make_data(**settings: object) -> SyntheticData:
    """Built data of its own; equal ones are generated and encoded once."""
    data = copy.copy(_encoded(**settings))
    data.splits = dict(data.splits)
    return data


@cache
def _encoded(**settings: object) -> SyntheticData:
    data = SyntheticData(Synthetic(**(ROWS | settings)))
    data.build(None)
    return data


def make_trainer(**settings: object) -> pl.Trainer:
    return pl.Trainer(
        **{
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
            "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
            "num_sanity_val_steps": 0, "limit_val_batches": 0, "inference_mode": False, **settings,
        }
    )  # fmt: skip


@cache
def _tiny_setup() -> Setup:
    return Setup.of(build_parser().parse_string(CONFIG))


def make_setup(**settings: object) -> Setup:
    """The setup of the tiny configuration, with other options of the module."""
    setup = _tiny_setup()
    return replace(setup, model=replace(setup.model, **({"from_scratch": MODEL, "pipelined": None} | settings)))


def write_config(folder: Path) -> str:
    path = folder / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


def run_fit(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m training.fit`` in a process of its own. Without a deadline, since machines may be busy."""
    return subprocess.run(
        [sys.executable, "-m", "training.fit", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"} | environment,
    )


def last_checkpoint(run: Path) -> Path | None:
    """Return the last checkpoint of the piece of a run that is under way; None before its first."""
    return next((run / "experiments").glob(".*/last.ckpt"), None)


def shared_folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that is made once for all tests that read it, in any file and worker.

    If making it fails, that is the error of the test that made it; the others are skipped and name it.
    """
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    done, failed = folder.with_suffix(".done"), folder.with_suffix(".failed")
    with FileLock(f"{folder}.lock"):
        if failed.exists():
            pytest.skip(f"the shared run {name!r} failed, see the error of {failed.read_text()}")
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
            folder.mkdir()
            try:
                make(folder)
            except BaseException:
                failed.write_text(os.environ.get("PYTEST_CURRENT_TEST", "another test"))
                raise
            done.touch()
    return folder
