"""All options of a run, checked together."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from jsonargparse import Namespace

from gates.errors import GateError
from gates.gating.latency import LatencyTable, TimeLimit
from training.config.checks import check_values
from training.config.data_base import DataOptions
from training.config.model import PrunerOptions
from training.config.run import EndOfRun, RunOptions, ScratchTraining, TrainerOptions, WandbOptions, WeightsKept

T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """All options of a run, checked."""

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
        """Return the setup of a configuration."""
        model = config.model
        if model.budget is None and model.price is None and model.prune > 0:
            raise GateError(
                "--model.budget is null, but --model.price is not given; give a price such as 0.01 for each open head, or a "
                "budget such as 18 or 0.25"
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
                "--patience is for a dense model alone (--model.prune 0 --model.retrain 0 --model.budget null); remove it, "
                "because a run that prunes has a fixed length"
            )
        for name in ("limit_val_batches", "limit_test_batches"):
            if getattr(self.trainer, name) == 0:
                raise GateError(f"--trainer.{name} is 0, but results need the selection and the test split; remove it")

    def with_seed(self, seed: int) -> Setup:
        return replace(self, run=replace(self.run, seed=seed))

    def within(self, table: LatencyTable) -> Setup:
        """Return the setup with a latency limit by the model's table in place of a budget in time."""
        return self.with_budget(TimeLimit.parse(str(self.model.budget), table)) if self.model.is_timed else self

    def with_budget(self, budget: Any) -> Setup:
        """Return the setup with another budget, of a kind that a command line may not have."""
        return replace(self, model=replace(self.model, budget=budget))

    def check_scratch(self) -> None:
        """Raise :class:`GateError` if the length of training from scratch is unknown.

        A run without fine-tuning is too short for new weights, because its dense model was trained before.
        """
        if self.model.finetune == 0 and self.scratch.from_scratch_epochs is None:
            raise GateError(
                "finetune is 0, so the run is too short to train from scratch; give the epochs of the dense model's training "
                "and the run together, for example --from_scratch_epochs 16"
            )


def group_of(options: type[T], config: Namespace) -> T:
    """Return a group of options without a prefix."""
    return group_at(options, config, "")


def group_at(options: type[T], config: Namespace, prefix: str) -> T:
    """Return a group of options with a prefix such as ``model.``."""
    values = {one.name: config[f"{prefix}{one.name}"] for one in fields(options) if one.init}  # type: ignore[arg-type]
    check_values(options, values, prefix)
    return options(**values)


def data_of(config: Any) -> DataOptions:
    """Return the data options of a configuration. jsonargparse would wrap the errors of the class in its own."""
    module, _, name = config.class_path.rpartition(".")
    kind, values = getattr(importlib.import_module(module), name), config.init_args.as_dict()
    check_values(kind, values, "data.")
    chosen: DataOptions = kind(**values)
    return chosen
