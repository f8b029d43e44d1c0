"""All options of a run, checked together."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from jsonargparse import Namespace

from gates.errors import GateError
from gates.gating.latency import LatencyTable, TimeLimit
from training.config.checks import check_values
from training.config.data import DataOptions
from training.config.model import PrunerOptions
from training.config.run import EndOfRun, RunOptions, ScratchTraining, TrainerOptions, WandbOptions, WeightsKept

T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """All options of a run, checked.

    Args:
        run, model, weights, scratch, end, wandb, data, trainer: see the classes.
    """

    run: RunOptions
    model: PrunerOptions
    weights: WeightsKept
    scratch: ScratchTraining
    end: EndOfRun
    wandb: WandbOptions
    data: DataOptions
    trainer: TrainerOptions

    @classmethod
    def of(cls, config: Namespace) -> Setup:
        """The setup that a configuration describes."""
        model = config.model
        if model.budget is None and model.price is None and model.prune > 0:
            raise GateError(
                "--model.budget is null, so a price decides how many heads stay, but --model.price is not given; give one, "
                "such as 0.01 for each open head, or a budget such as 18 or 0.25"
            )
        return cls(
            run=group_of(RunOptions, config),
            model=group_at(PrunerOptions, config, "model."),
            weights=group_of(WeightsKept, config),
            scratch=group_of(ScratchTraining, config),
            end=group_of(EndOfRun, config),
            wandb=group_at(WandbOptions, config, "wandb."),
            data=data_of(config.data),
            trainer=group_at(TrainerOptions, config, "trainer."),
        )

    def __post_init__(self) -> None:
        if self.weights.patience is not None and self.model.prune > 0:
            raise GateError(
                "--patience ends the training of a dense model alone (--model.prune 0 --model.retrain 0 --model.budget null); "
                "a run that prunes has a fixed length, so that all methods get equally many steps"
            )
        for name in ("limit_val_batches", "limit_test_batches"):
            if getattr(self.trainer, name) == 0:
                raise GateError(f"--trainer.{name} is 0, but results are of the selection and the test split; remove it")

    def with_seed(self, seed: int) -> Setup:
        """The same with another seed."""
        return replace(self, run=replace(self.run, seed=seed))

    def within(self, table: LatencyTable) -> Setup:
        """The same, in which a budget in time has become a limit by a table of the model's."""
        budget = self.model.budget
        if not isinstance(budget, str):
            return self
        limited: dict[str, Any] = {"budget": TimeLimit.parse(budget, table)}  # which no command line says
        return replace(self, model=replace(self.model, **limited))

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
    return group_at(options, config, "")


def group_at(options: type[T], config: Namespace, prefix: str) -> T:
    """A group of options.

    Args:
        options: its class.
        config: that it is in.
        prefix: what its options begin with, such as ``model.``.
    """
    values = {one.name: config[f"{prefix}{one.name}"] for one in fields(options) if one.init}  # type: ignore[arg-type]
    check_values(options, values, prefix)
    return options(**values)


def data_of(config: Any) -> DataOptions:
    """The kind of data that a configuration names, with its options; made by hand, since the parser would wrap the errors of
    the class in its own."""
    module, _, name = config.class_path.rpartition(".")
    kind, values = getattr(importlib.import_module(module), name), config.init_args.as_dict()
    check_values(kind, values, "data.")
    chosen: DataOptions = kind(**values)
    return chosen
