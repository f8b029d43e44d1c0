"""The command line of a run, which comparisons and sweeps add to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from jsonargparse import ActionConfigFile, ArgumentParser

from training.config import EndOfRun, PrunerOptions, RunOptions, ScratchTraining, WandbOptions, WeightsKept
from training.config.data import KINDS, Data
from training.config.trainer import TrainerOptions

GROUPS: tuple[tuple[type, str], ...] = (
    (RunOptions, ""),
    (PrunerOptions, "model."),
    (EndOfRun, ""),
    (ScratchTraining, ""),
    (WeightsKept, ""),
    (TrainerOptions, "trainer."),
    (WandbOptions, "wandb."),
)
"""The options of a run beside those of its data, each with its prefix."""


def build_parser(prog: str = "python -m training.fit") -> ArgumentParser:
    """What reads the options of a run from a command line and configurations."""
    parser = ArgumentParser(prog=prog)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file; see the folder configs.")
    for group, prefix in GROUPS:
        parser.add_class_arguments(group, prefix.removesuffix(".") or None)
    parser.add_subclass_arguments(Data, "data", required=True)
    return parser


def data_options(kinds: Collection[type] = tuple(KINDS.values())) -> set[str]:
    """The options of all kinds of data, which the parser does not list since they depend on the kind."""
    names = {field.name for kind in kinds for field in fields(kind)}
    return {f"--data.{name}" for name in names} | {f"--data.init_args.{name}" for name in names}
