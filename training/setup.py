"""Data, module and trainer from a run's options: what every command that trains begins with."""

from __future__ import annotations

import importlib
import logging
import warnings
from argparse import SUPPRESS
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytorch_lightning as pl
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace
from pytorch_lightning.utilities import rank_zero_only
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from rich.console import Console

from gates.errors import GateError
from training.config import EndOfRun, PrunerOptions, RunOptions, ScratchTraining, WeightsKept
from training.data.base import TaskData
from training.data.classification import ClassificationData
from training.pruner.averaging import AverageWeights
from training.pruner.module import HeadPruner
from training.pruner.stage_progress import StageProgress
from training.runs import progress
from training.runs.tracking import WandbOptions
from training.tasks import read_config, stated_labels

T = TypeVar("T")
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
UNHELPFUL_WARNINGS = (
    ".*does not have many workers.*",
    ".*number of training batches.*",
    ".*LeafSpec.*",
    ".*exists and is not empty.*",
    "Be aware that when using `ckpt_path`.*",
)


@dataclass(frozen=True)
class Setup:
    """All that a run is told, checked.

    Args:
        run, model, weights, scratch, end, wandb: see the classes.
        data_class: path of a class of data.
        data_options: its arguments.
        trainer: settings of Lightning's trainer.

    Raises:
        GateError: for options that contradict each other.
    """

    run: RunOptions
    model: PrunerOptions
    weights: WeightsKept
    scratch: ScratchTraining
    end: EndOfRun
    wandb: WandbOptions
    data_class: str
    data_options: Mapping[str, Any]
    trainer: Mapping[str, Any]

    @classmethod
    def of(cls, config: Namespace) -> Setup:
        """The setup that a configuration describes."""
        return cls(
            run=group_of(RunOptions, config),
            model=PrunerOptions(**config.model.as_dict()),
            weights=group_of(WeightsKept, config),
            scratch=group_of(ScratchTraining, config),
            end=group_of(EndOfRun, config),
            wandb=WandbOptions(**config.wandb.as_dict()),
            data_class=config.data.class_path,
            data_options=config.data.init_args.as_dict(),
            trainer=config.trainer.as_dict(),
        )

    def __post_init__(self) -> None:
        if self.weights.patience is not None and self.model.prune > 0:
            raise GateError(
                "--patience ends the training of a dense model alone (--model.prune 0 --model.retrain 0 --model.budget null); "
                "a run that prunes has a fixed length, so that all methods get equally many steps"
            )
        for name in ("limit_val_batches", "limit_test_batches"):
            if self.trainer[name] == 0:
                raise GateError(f"--trainer.{name} is 0, but results are of the selection and the test split; leave it away")

    def with_seed(self, seed: int) -> Setup:
        """The same with another seed."""
        return replace(self, run=replace(self.run, seed=seed))

    def check_scratch(self) -> None:
        """Raises :class:`GateError` if nothing says how long new weights are to be trained: a run without fine-tuning is
        short, because its dense model was trained before."""
        if self.model.finetune == 0 and self.scratch.from_scratch_epochs is None:
            raise GateError(
                "models trained from scratch get as many updates as the run by default, but here the dense model was trained "
                "before it (finetune is 0); give the epochs of both together, for example --from_scratch_epochs 16"
            )


def group_of(options: type[T], config: Namespace) -> T:
    """A group whose options stand at the top of a configuration."""
    return options(**{one.name: config[one.name] for one in fields(options) if one.init})  # type: ignore[arg-type]


def build_parser(
    prog: str = "python -m training.fit", description: str | None = None, hidden: Collection[str] = ()
) -> ArgumentParser:
    """The command line of a run; other commands that train add to it.

    Args:
        prog: the command.
        description: its first line is shown.
        hidden: options that this command takes from configurations without using them.
    """
    parser = ArgumentParser(prog=prog, description=description.splitlines()[0] if description else None)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; the embedded default if no --config is given.")
    for group in (RunOptions, EndOfRun, ScratchTraining, WeightsKept):
        parser.add_class_arguments(group)
    parser.add_class_arguments(PrunerOptions, "model")
    parser.add_subclass_arguments(TaskData, "data", required=True)
    parser.add_class_arguments(pl.Trainer, "trainer", skip={*SET_BY_RUN, *BATCHES})
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


def open_data(setup: Setup, checkpoint: str | None = None) -> TaskData:
    """The data, read and encoded, in the order of the run's seed.

    Args:
        setup: of the run.
        checkpoint: that the run goes on from, whose run may hold files of the data, such as a vocabulary.
    """
    pl.seed_everything(setup.run.seed, workers=True, verbose=False)
    module, _, name = setup.data_class.rpartition(".")  # by hand, since the parser would wrap the class's own errors
    data: TaskData = getattr(importlib.import_module(module), name)(**setup.data_options)
    data.order_by(setup.run.seed)
    if checkpoint is not None:
        data.use_files_of(Path(checkpoint).resolve().parents[1])
    backbone, trusted = setup.model.backbone, setup.model.trust_remote_code
    if backbone is not None:
        data.check_backbone(read_config(backbone, trust_remote_code=trusted), backbone)
    with progress.stage("reading and tokenizing the data"):
        data.build(backbone, stated_labels(backbone, trust_remote_code=trusted))
    with progress.paused():
        for notice in data.notices:
            rank_zero_only(Console().print)(notice, markup=False, highlight=False, soft_wrap=True)
    return data


def open_classification(setup: Setup) -> ClassificationData:
    """The same for commands that know classes only.

    Raises:
        GateError: for data of another task.
    """
    data = open_data(setup)
    if not isinstance(data, ClassificationData):
        raise GateError(
            f"{type(data).__name__} is data of another task, and this command works on classifiers so far; training.fit "
            "compares methods on any task at the end of a run"
        )
    return data


def make_pruner(setup: Setup, data: TaskData, options: PrunerOptions | None = None) -> HeadPruner:
    """The module, built, with the weights of the run's seed.

    Args:
        setup: of the run.
        data: built.
        options: of the module, in place of the setup's.
    """
    pl.seed_everything(setup.run.seed, workers=True, verbose=False)
    pruner = HeadPruner(options or setup.model, seed=setup.run.seed)
    assert data.tokenizer is not None
    with progress.stage("loading the model"):
        pruner.build(data.task, data.tokenizer)
    return pruner


def make_trainer(setup: Setup, *callbacks: pl.Callback, logger: Any = False, **overrides: Any) -> pl.Trainer:
    """A trainer with the run's settings; it logs and writes checkpoints only if it is given what for."""
    weights = setup.weights
    averaging = [AverageWeights(weights.average_last, weights.average_every)] if weights.average_last > 1 else []
    with warnings.catch_warnings(), mended_settings():
        warnings.simplefilter("ignore")
        return pl.Trainer(
            **{
                **setup.trainer,
                **overrides,
                "max_epochs": 1,  # the loader holds every epoch of the run
                "inference_mode": False,  # metrics and masks go on to be changed outside of it
                "logger": logger,
                "callbacks": [*averaging, *callbacks, StageProgress()],
                "enable_checkpointing": False,  # LastGoodCheckpoint does it
                "enable_progress_bar": False,  # StageProgress shows what is done
            }
        )


def draws_bars(setup: Setup) -> bool:
    """Whether progress is shown."""
    return setup.trainer["enable_progress_bar"] is not False


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
