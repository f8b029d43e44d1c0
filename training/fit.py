"""``python -m training.fit``: learn which heads to keep, compare, export.

Reads top to bottom: parse the command line, train, compare, write the run directory.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import warnings
from argparse import SUPPRESS
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from rich.console import Console

from gates.errors import GateError
from training.cli import finish, stdout, with_config
from training.comparison.from_scratch import check_length, train_from_scratch
from training.comparison.results import export, send_results, show, summarise, write_results
from training.comparison.run_comparison import METHODS, Comparison, check_methods, compare
from training.comparison.translations import compare_translations, save_translations
from training.data.base import TaskData
from training.data.classification import ClassificationData
from training.pruner.averaging import AverageWeights, StopEarly
from training.pruner.callbacks import DenseCheckpoint, GateLog, LastGoodCheckpoint, OpenHeadsBar
from training.pruner.checkpoints import check_checkpoint
from training.pruner.evaluation import evaluate
from training.pruner.module import HeadPruner
from training.pruner.options import LARGEST_SEED
from training.runs.run_directory import Existing, RunDirectory
from training.runs.tracking import WandbOptions
from training.tasks import read_config, stated_labels

SET_BY_RUN = ("logger", "callbacks", "max_epochs", "max_steps", "min_epochs", "min_steps", "max_time", "inference_mode")
"""Options of the trainer that the run decides."""
BATCHES = {
    "limit_train_batches": "Training batches of an epoch: a count such as 10, or a share such as 0.5 (default: all).",
    "limit_val_batches": "The same of the selection split.",
    "limit_test_batches": "The same of the test split.",
    "limit_predict_batches": "Not used.",
    "overfit_batches": "The same few batches for training and selection, to see whether they can be learned (default: none).",
}
"""Options of the trainer where 1 is a batch and 1.0 is all of them. Their types are stated here, since Python may have kept the
trainer's own as another library once wrote it, ``float`` first, and 1 would become 1.0."""
RUN_DIR_OF_FIRST = "HEAD_GATES_RUN_DIR"
"""Environment variable by which the first process tells those that Lightning starts where it writes."""


UNHELPFUL_WARNINGS = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*LeafSpec.*",
    ".*exists and is not empty.*",
    "Be aware that when using `ckpt_path`.*",
)


def build_parser(
    prog: str = "python -m training.fit", description: str | None = __doc__, hidden: Collection[str] = ()
) -> ArgumentParser:
    """The command line; other commands that train add to it.

    Args:
        prog: the command.
        description: its first line is shown.
        hidden: options that this command takes from configurations without using them.
    """
    parser = ArgumentParser(prog=prog, description=description.splitlines()[0] if description else None)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; the embedded default if no --config is given.")
    parser.add_argument("--run_dir", type=str | None, default=None, help="Where to write (default: runs/NAME).")
    parser.add_argument("--existing", type=Existing, default="refuse", help="What to do if --run_dir holds a run.")
    parser.add_argument("--name", type=str, default="run", help="Name of the run; the default directory is runs/NAME.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights, data order, gates and dropout.")
    parser.add_argument("--ckpt_path", type=str | None, default=None, help="Checkpoint to resume from, of this or another run.")
    parser.add_argument("--save_every", type=int, default=200, help="Optimiser steps between checkpoints.")
    parser.add_argument(
        "--compare",
        type=Literal["none", "posthoc", "full"],
        default="full",
        help="At the end of the run: nothing; every method's mask on the dense model; also trained on with each mask.",
    )
    parser.add_argument(
        "--settled", type=list[str] | None, default=None, help="With --compare full, methods to train on (default: all)."
    )
    parser.add_argument(
        "--from_scratch",
        type=list[str],
        default=[],
        help="With --compare full, methods whose mask is also trained from new weights, for as many steps as the whole run.",
    )
    parser.add_argument(
        "--from_scratch_epochs", type=float | None, default=None, help="Length of these trainings (default: the run's)."
    )
    parser.add_argument(
        "--from_scratch_learning_rate", type=float | None, default=None, help="At its peak (default: the run's)."
    )
    parser.add_argument("--average_last", type=int, default=1, help="Checkpoints averaged at the end of warm-up and run.")
    parser.add_argument("--average_every", type=int, default=100, help="Optimiser steps between them.")
    parser.add_argument(
        "--patience", type=int | None, default=None, help="Validations without improvement after which a dense-only run ends."
    )
    parser.add_argument(
        "--curve",
        type=list[float],
        default=[0.75, 0.5, 0.25, 0.125],
        help="Budgets of the post hoc curve, as fractions of all heads; with a budget per kind, of each pruned kind.",
    )
    parser.add_class_arguments(HeadPruner, "model", skip={"seed"})
    parser.add_subclass_arguments(TaskData, "data", required=True)
    parser.add_class_arguments(
        pl.Trainer,
        "trainer",
        skip={*SET_BY_RUN, *BATCHES},
    )
    for name, what in BATCHES.items():
        default = 0.0 if name == "overfit_batches" else None
        parser.add_argument(f"--trainer.{name}", type=int | float | None, default=default, help=what)
    parser.add_class_arguments(WandbOptions, "wandb")
    parser.set_defaults(
        {
            "trainer.use_distributed_sampler": False,
            "trainer.enable_model_summary": False,
            "trainer.num_sanity_val_steps": 0,
            "trainer.log_every_n_steps": 10,
            "trainer.gradient_clip_val": 1.0,
        }
    )
    for action in parser._actions:
        if action.dest in hidden:
            action.help = SUPPRESS
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 for input that its user can mend."""
    quiet_libraries()
    parser = build_parser()
    return finish(
        lambda: parser.parse_args(with_config(arguments)),
        lambda config: fit(parser, config),
        when_stopped="go on with --existing resume",
    )


def fit(parser: ArgumentParser, config: Namespace) -> RunDirectory:
    """The whole run."""
    console = stdout()
    settled = ["dense", *METHODS] if config.settled is None else config.settled
    check_methods(settled, more=("dense",))
    check_methods(config.from_scratch, more=("dense",))
    if config.from_scratch:
        check_length(config.model.warm_up, config.from_scratch_epochs)
    for fraction in config.curve:
        if not 0 < fraction <= 1:
            raise GateError(f"--curve has the budget {fraction}; expected fractions of all heads above 0 and at most 1")
    if not 0 <= config.seed <= LARGEST_SEED:
        raise GateError(f"--seed is {config.seed}; expected a whole number from 0 to {LARGEST_SEED}")
    for name in ("save_every", "average_last", "average_every"):
        if config[name] < 1:
            raise GateError(f"--{name} is {config[name]}; expected at least 1")
    check_patience(config)
    first = int(os.environ.get("LOCAL_RANK", 0)) == int(os.environ.get("RANK", 0)) == 0
    if first:
        name = config.name
        if "WANDB_SWEEP_ID" in os.environ and "WANDB_RUN_ID" in os.environ:  # agents start together
            name = f"{name}-{os.environ['WANDB_RUN_ID']}"
        run = RunDirectory.claim(config.run_dir, name, config.existing)
        os.environ[RUN_DIR_OF_FIRST] = str(run.path)
    elif RUN_DIR_OF_FIRST not in os.environ and config.run_dir is None:
        raise GateError("started by torchrun or a cluster, all processes need the same --run_dir; give one")
    else:
        run = RunDirectory.of_other_process(os.environ.get(RUN_DIR_OF_FIRST) or config.run_dir, config.name, config.existing)

    checkpoint = config.ckpt_path or (str(run.checkpoint("last")) if run.resumes else None)
    pruner, data = instantiate(config, checkpoint)
    if checkpoint is not None:
        check_checkpoint(checkpoint, pruner)
        if first and not run.resumes and run.path.resolve() in Path(checkpoint).resolve().parents:
            raise GateError(f"--ckpt_path {checkpoint!r} lies in the run that would be overwritten; give another --run_dir")

    gate_log, dense = GateLog(), DenseCheckpoint(run.checkpoint("dense"), checkpoint)
    stop = [] if config.patience is None else [StopEarly(pruner.task.main_metric, config.patience)]
    bar = [] if config.trainer.enable_progress_bar is False else [OpenHeadsBar()]
    callbacks = [*stop, gate_log, dense, LastGoodCheckpoint(run.checkpoint("last"), every=config.save_every), *bar]
    interval = config.trainer.val_check_interval or data.validation_interval(pruner.epochs)
    trainer = make_trainer(config, callbacks=callbacks, val_check_interval=interval)  # before anything is written

    resolved = parser.dump(config, skip_unset=False)
    if first:
        run.create(resolved)
        data.write_files(run.path)
    wandb_logger = WandbOptions(**config.wandb.as_dict()).make_logger(run.path, yaml.safe_load(resolved))
    trainer.loggers = [CSVLogger(run.path, name="", version=""), *([wandb_logger] if wandb_logger else [])]
    start = time.perf_counter()
    trainer.fit(pruner, data, ckpt_path=checkpoint, weights_only=True)
    seconds = time.perf_counter() - start
    trainer.save_checkpoint(run.checkpoint("final"), weights_only=True)

    warm_up, _, end = pruner.boundaries
    kind = ("dense", "trained") if warm_up == end else ("learned", "settled")  # without a prune phase nothing was learned
    learned_row = {"method": kind[0], "stage": kind[1], "heads": pruner.gates.open_heads()}
    learned_row |= evaluate(make_trainer(config), pruner, data)
    learned_row |= {"steps": max(0, trainer.global_step - warm_up), "seconds": dense.seconds_since()}
    if trainer.is_global_zero:
        export(run, pruner, data, learned_row)
        save_translations(run, data, ".".join(kind), pruner.outputs.get("test", {}))

    def trainers(*callbacks: pl.Callback, **overrides: Any) -> pl.Trainer:
        return make_trainer(config, callbacks=callbacks, **overrides)

    if config.compare == "none":
        result = Comparison(rows=[learned_row], masks={"learned": pruner.gates.mask.detach().cpu().clone()})
    else:
        result = compare(
            pruner,
            data,
            run,
            trainers,
            learned_row=learned_row,
            settled=settled if config.compare == "full" else [],
            curve_fractions=config.curve,
            show_progress=bool(bar),
        )
    for method in config.from_scratch if config.compare == "full" else []:
        mask = torch.ones(pruner.gates.size) if method == "dense" else result.masks[method]
        row = train_from_scratch(
            pruner,
            data,
            mask,
            trainers,
            method=method,
            epochs=config.from_scratch_epochs,
            learning_rate=config.from_scratch_learning_rate,
            seed=config.seed,
        )
        result.rows.append(row)
        if trainer.is_global_zero:
            save_translations(run, data, f"{method}.from scratch", pruner.outputs.get("test", {}))
    if trainer.is_global_zero:
        mode = WandbOptions(**config.wandb.as_dict()).resolved_mode()
        metrics = summarise(pruner, result, learned_row, seed=config.seed, seconds=seconds, wandb_mode=mode)
        write_results(run, pruner, gate_log, result, metrics)
        compare_translations(run, data)
        if wandb_logger is not None:
            send_results(wandb_logger, run, result, metrics)
        show(console, run, result, metrics, wandb_logger, pruner.task.main_metric)
    return run


def check_patience(config: Namespace) -> None:
    """Raises :class:`GateError` for early stopping where it makes no sense."""
    if config.patience is None:
        return
    if config.patience < 1:
        raise GateError(f"--patience is {config.patience}; expected at least 1 validation")
    if config.model.prune > 0:
        raise GateError(
            "--patience ends the training of a dense model alone (--model.prune 0 --model.settle 0 --model.budget null); a run "
            "that prunes has a fixed length, so that all methods get equally many steps"
        )
    if config.average_last > 1:
        raise GateError("--patience keeps the best weights and --average_last the average of the last; give one of them")


def instantiate(config: Namespace, checkpoint: str | None = None) -> tuple[HeadPruner, TaskData]:
    """The module and the data, built, with the run's seed.

    Args:
        config: of the run.
        checkpoint: that the run goes on from, whose run may hold files of the data, such as a vocabulary.
    """
    data = open_data(config, checkpoint)
    return make_pruner(config, data), data


def open_data(config: Namespace, checkpoint: str | None = None) -> TaskData:
    """The data, read and encoded, in the order of the run's seed; see :func:`instantiate`."""
    pl.seed_everything(config.seed, workers=True, verbose=False)
    HeadPruner(**config.model.as_dict(), seed=config.seed)  # complains of bad options before data are read
    module, _, name = config.data.class_path.rpartition(".")  # by hand, since the parser would wrap the class's own errors
    data: TaskData = getattr(importlib.import_module(module), name)(**config.data.init_args.as_dict())
    data.order_by(config.seed)
    if checkpoint is not None:
        data.use_files_of(Path(checkpoint).resolve().parents[1])
    backbone, trusted = config.model.backbone, config.model.trust_remote_code
    if backbone is not None:
        data.check_backbone(read_config(backbone, trust_remote_code=trusted), backbone)
    data.build(backbone, stated_labels(backbone, trust_remote_code=trusted))
    for notice in data.notices:
        rank_zero_only(Console().print)(notice, markup=False, highlight=False, soft_wrap=True)
    return data


def open_classification(config: Namespace) -> ClassificationData:
    """The same for commands that know classes only.

    Raises:
        GateError: for data of another task.
    """
    data = open_data(config)
    if not isinstance(data, ClassificationData):
        raise GateError(
            f"{type(data).__name__} is data of another task, and this command works on classifiers so far; training.fit "
            "compares methods on any task at the end of a run"
        )
    return data


def make_pruner(config: Namespace, data: TaskData, options: Mapping[str, Any] | None = None) -> HeadPruner:
    """The module, built, with the weights of the run's seed.

    Args:
        config: of the run.
        data: built.
        options: of the module, in place of the configuration's.
    """
    pl.seed_everything(config.seed, workers=True, verbose=False)
    pruner = HeadPruner(**{**config.model.as_dict(), **(options or {})}, seed=config.seed)
    assert data.tokenizer is not None
    pruner.build(data.task, data.tokenizer)
    return pruner


def make_trainer(
    config: Namespace, *, logger: Any = False, callbacks: Sequence[pl.Callback] = (), **overrides: Any
) -> pl.Trainer:
    """A trainer with the run's settings; it logs, draws a bar and writes checkpoints only if it is given what for."""
    for name in ("limit_val_batches", "limit_test_batches"):
        if config.trainer[name] == 0:
            raise GateError(f"--trainer.{name} is 0, but results are of the selection and the test split; leave it away")
    settings = config.trainer.as_dict() | overrides
    averaging = [AverageWeights(config.average_last, config.average_every)] if config.average_last > 1 else []
    with warnings.catch_warnings(), mended_settings():
        warnings.simplefilter("ignore")
        return pl.Trainer(
            **{
                **settings,
                "max_epochs": 1,  # the loader holds every epoch of the run
                "inference_mode": False,  # metrics and masks go on to be changed outside of it
                "logger": logger,
                "callbacks": [*averaging, *callbacks],
                "enable_checkpointing": False,  # LastGoodCheckpoint does it
                "enable_progress_bar": any(isinstance(callback, OpenHeadsBar) for callback in callbacks),
            }
        )


@contextmanager
def mended_settings() -> Iterator[None]:
    """Lightning's complaints about trainer settings as one sentence."""
    try:
        yield
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        raise GateError(f"a --trainer setting does not work here: {' '.join(str(error).split())}") from error


def quiet_libraries() -> None:
    """Hints and progress bars that say nothing about this run."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    for message in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message)


if __name__ == "__main__":
    sys.exit(main())
