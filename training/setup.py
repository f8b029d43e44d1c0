"""Data, module and trainer from a run's options: what every command that trains begins with."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from transformers.utils import logging as transformers_logging

from gates.errors import GateError
from training.config import PrunerOptions, Setup
from training.config.data import Text
from training.data.base import TaskData
from training.data.text import TextData
from training.pruner.callbacks import AverageWeights
from training.pruner.checkpoints import WholeCheckpoints
from training.pruner.logging import StageProgress
from training.pruner.module import HeadPruner
from training.runs import processes, progress
from training.runs.directory import CONFIG
from training.runs.launched import is_first_process, launched
from training.stats.numbers import listed
from training.tasks import names_of_classes, read_config, stated_labels
from training.tasks.classification import SentenceTask
from training.tasks.encoder_decoder import check_longest
from training.tasks.loading import base_model_name

UNHELPFUL_WARNINGS = (
    ".*does not have many workers.*", ".*number of training batches.*", ".*LeafSpec.*",
    ".*will save all targets and predictions in the buffer.*", ".*exists and is not empty.*",
    "Be aware that when using `ckpt_path`.*",
)  # fmt: skip


def open_data(setup: Setup, checkpoint: str | None = None) -> TaskData:
    """Return the data, read and encoded, in the order of the run's seed.

    Args:
        checkpoint: The checkpoint to start from, whose run may hold files of the data, such as a vocabulary.
    """
    pl.seed_everything(setup.run.seed, workers=True, verbose=False)
    module, _, name = setup.data.reader.partition(":")
    data: TaskData = getattr(importlib.import_module(module), name)(setup.data)
    data.order_by(setup.run.seed)
    if checkpoint is not None:
        runs = [folder for folder in Path(checkpoint).resolve().parents if (folder / CONFIG).is_file()]
        data.use_files_of((runs or [Path(checkpoint).parent])[0])
    backbone, trusted = setup.model.backbone, setup.model.trust_remote_code
    if backbone is not None:
        data.check_backbone(read_config(backbone, trust_remote_code=trusted), backbone)
    with progress.stage("reading and tokenizing the data"):
        unlabelled = isinstance(setup.data, Text) and setup.data.unlabelled
        data.build(backbone, stated_labels(backbone, trust_remote_code=trusted, placeholders=unlabelled))
        if isinstance(data, TextData) and unlabelled:
            if setup.model.finetune > 0:
                raise GateError(
                    f"unlabelled is true, but finetune is {setup.model.finetune:g} epochs, so the model would learn its own "
                    "predictions; set --model.finetune 0"
                )
            model: torch.nn.Module = data.task.build(setup.model, data.processor)
            data.label_by(model.to(make_trainer(setup).strategy.root_device))  # type: ignore[arg-type]
    if backbone is not None and checkpoint is None and setup.model.finetune == 0 and data.labels:
        data.labels = names_of_classes(data.labels, read_config(backbone, trust_remote_code=trusted), backbone)
    check_limits(setup, data)
    for sentence in (data.describe(), *data.notices):
        progress.notice(sentence)
    return data


def with_min_steps(setup: Setup, data: TaskData) -> Setup:
    """Return the setup with a finetune and a prune phase of the least number of steps, and say which are longer."""
    longer = longer_phases(setup, data)
    if longer:
        given = listed([f"{getattr(setup.model, phase):g}" for phase in longer])
        steps = f"{setup.model.min_steps} steps{' each' if len(longer) > 1 else ''} ({max(longer.values()):.3g} epochs)"
        progress.notice(f"{listed(list(longer))}: {steps} instead of {given} epochs, because of --model.min_steps")
    return replace(setup, model=replace(setup.model, **longer))


def longer_phases(setup: Setup, data: TaskData) -> dict[str, Any]:
    """Return the epochs of those phases that would have fewer steps than ``min_steps``, by name.

    The retrain phase stays: heads of a score also train for the steps of the prune phase. A limit on training batches has
    precedence.
    """
    options, trainer = setup.model, setup.trainer
    if trainer.limit_train_batches is not None:
        return {}
    batches = len(data.batches_of_run(epochs=1.0, first=0, rank=processes.rank(), world=processes.world_size()))
    least = options.min_steps * (trainer.accumulate_grad_batches or 1) / batches
    return {phase: least for phase in ("finetune", "prune") if 0 < getattr(options, phase) < least}


def check_limits(setup: Setup, data: TaskData) -> None:
    """Raise :class:`GateError` for a share of a split's batches that is less than one batch, and for more batches between
    validations than the run has."""

    def of_run() -> Sized:
        epochs = replace(setup.model, **longer_phases(setup, data)).epochs
        return data.batches_of_run(epochs=epochs, first=0, rank=processes.rank(), world=processes.world_size())

    batches: dict[str, Callable[[], Sized]] = {
        "train": of_run,
        "val": data.val_dataloader,
        "test": data.test_dataloader,
    }
    for name, made in batches.items():
        share = getattr(setup.trainer, f"limit_{name}_batches")
        if isinstance(share, float) and share < 1 and int(share * (count := len(made()))) == 0:
            raise GateError(
                f"--trainer.limit_{name}_batches is {share:g}, which is less than one of {count} batches; give a number of "
                "batches, such as 1, or a larger share"
            )
    interval, limit = setup.trainer.val_check_interval, setup.trainer.limit_train_batches
    if isinstance(interval, int):
        count = len(batches["train"]())
        count = min(count, limit) if isinstance(limit, int) else int(count * (1.0 if limit is None else limit))
        if interval > count:
            raise GateError(
                f"--trainer.val_check_interval is {interval}, more than the {count} batches of the run; give at most that, or "
                "a share of the run, such as 0.5"
            )


def make_pruner(setup: Setup, data: TaskData, options: PrunerOptions | None = None) -> HeadPruner:
    """Return the built module with the weights of the run's seed."""
    pl.seed_everything(setup.run.seed, workers=True, verbose=False)
    pruner = HeadPruner(options or setup.model, seed=setup.run.seed)
    with progress.stage("loading the model"):
        pruner.build(data.task, data.processor)
    if isinstance(data.task, SentenceTask) and data.tokenizer is not None:
        longest = max(max(split["length"][:]) for split in data.splits.values())
        check_longest(pruner.backbone.config, repr(base_model_name(setup.model)), longest)
    return pruner


def make_trainer(
    setup: Setup, *callbacks: pl.Callback, logger: Any = False, identity: str | None = None, **overrides: Any
) -> pl.Trainer:
    """Return a trainer with the run's settings."""
    weights = setup.weights
    averaging = [AverageWeights(weights.average_last, weights.average_every)] if weights.average_last > 1 else []
    apple = setup.trainer.accelerator == "auto" and torch.backends.mps.is_available() and not torch.cuda.is_available()
    plugins = [setup.trainer.plugins] if isinstance(setup.trainer.plugins, str) else setup.trainer.plugins or []
    world = launched(os.environ)
    options = setup.trainer if world is None else world.fitted(setup.trainer)
    with warnings.catch_warnings(), mended_settings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **{
                **asdict(options),
                **({"accelerator": "cpu"} if apple else {}),  # Lightning would take MPS, which has no float64
                **overrides,
                "max_epochs": 1,  # the loader holds every epoch of the run
                "use_distributed_sampler": False,  # and shares the examples out
                "num_sanity_val_steps": 0,
                "enable_model_summary": False,
                "inference_mode": False,  # metrics and masks are changed later
                "plugins": [*plugins, WholeCheckpoints(identity), processes.environment_of(world)],
                "logger": logger,
                "callbacks": [*averaging, *callbacks, StageProgress()],
                "enable_checkpointing": False,  # LastGoodCheckpoint does it
                "enable_progress_bar": False,  # StageProgress shows progress
            }
        )
    if world is None and trainer.world_size == 1 and not is_first_process(os.environ):
        raise GateError(
            "RANK, LOCAL_RANK or NODE_RANK is above 0, but this process trains alone; use torchrun or srun, or unset them"
        )
    if world is not None and trainer.world_size != world.size:
        raise GateError(
            f"--trainer.strategy {setup.trainer.strategy} trains in {trainer.world_size} process, but {world.launcher} started "
            f"{world.size}; use --trainer.strategy ddp"
        )
    return trainer


def start_launched(setup: Setup, resolved: str) -> None:
    """Connect the processes that a launcher started, so that one of them decides for all from the beginning."""
    world = launched(os.environ)
    if world is not None and world.size > 1:
        processes.start(make_trainer(setup))
        processes.check_agree((resolved, os.environ.get("WANDB_RUN_ID")), "options, or different runs of a sweep")


@contextmanager
def mended_settings() -> Iterator[None]:
    """Turn Lightning's errors about trainer settings into one sentence."""
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise GateError(f"a --trainer setting does not work here: {' '.join(str(error).split())}") from error


def quiet_libraries() -> None:
    """Hide hints and progress bars of libraries."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    for message in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message)
