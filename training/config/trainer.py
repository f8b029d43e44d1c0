"""Lightning's trainer: the options ``--trainer.NAME`` that a run leaves to its user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gates.errors import GateError
from training.config.checks import at_least_0, at_least_1, at_most

MOST_DEVICES = 4096
"""Of a machine, and machines: Lightning makes a list of them."""

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "transformer-engine", "transformer-engine-float16")
OTHER_NAMES = ("32", "64", "bf16", "16")
"""Of the first four precisions."""

TRUE_HALF = ("bf16-true", "16-true")
"""Precisions of Lightning in which everything is rounded, weights and labels and sums of metrics."""
SHARDING = ("fsdp", "deepspeed", "model_parallel")
"""What strategies of Lightning that spread a model over devices begin with."""


@dataclass(frozen=True)
class TrainerOptions:
    """Settings of ``pytorch_lightning.Trainer``, under its names. Whatever else it takes the run decides.

    Types are stated in the order in which a value is tried: for numbers of batches 1 is a batch and 1.0 is all of them.

    Args:
        accelerator: ``cpu``, ``gpu``, or ``auto`` for a GPU where there is one. Apple's GPUs (``mps``) have no float64, which
            prices and scores need, so ``auto`` is ``cpu`` there.
        devices: how many devices, or which ones, such as 2 or [0,3].
        precision: of arithmetic, such as ``32-true``, ``bf16-mixed`` or ``16-mixed`` (default: 32-true).
        strategy: how several devices work together, such as ``ddp``.
        num_nodes: machines that take part, each with so many devices.
        accumulate_grad_batches: batches for each optimiser step.
        gradient_clip_val: largest norm of the model's gradient; null for no limit.
        gradient_clip_algorithm: ``norm`` (default) or ``value``.
        limit_train_batches: training batches of an epoch: a count such as 10, or a share such as 0.5 (default: all).
        limit_val_batches: the same of the selection split.
        limit_test_batches: the same of the test split.
        val_check_interval: batches, or share of the run, between validations (default: once per epoch of the data).
        log_every_n_steps: optimiser steps between two rows of metrics.csv and W&B.
        enable_progress_bar: whether progress is shown.
        deterministic: whether operations that are not deterministic are refused (true) or named (``warn``).
        benchmark: whether cuDNN looks for the fastest algorithms.
        plugins: names of plugins of Lightning.
    """

    accelerator: str = "auto"
    devices: list[int] | int | str = "auto"
    precision: int | str | None = None
    strategy: str = "auto"
    num_nodes: int = 1
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = 1.0
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    val_check_interval: int | float | None = None
    log_every_n_steps: int | None = 10
    enable_progress_bar: bool | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    plugins: list[str] | str | None = None

    def __post_init__(self) -> None:
        at_least_1(self, "num_nodes", "accumulate_grad_batches", "log_every_n_steps", prefix="--trainer.")
        at_least_0(self, "gradient_clip_val", prefix="--trainer.")
        at_most(self, MOST_DEVICES, "num_nodes", *["devices"] * isinstance(self.devices, int), prefix="--trainer.")
        if self.accelerator == "mps":
            raise GateError("--trainer.accelerator is mps, which has no float64 for prices and scores; give cpu")
        if self.strategy.startswith(SHARDING):
            raise GateError(
                f"--trainer.strategy is {self.strategy}, which spreads a model over devices, but here each holds a "
                "whole one; use ddp, or gates with a loop of your own (gates.replicate_)"
            )
        if str(self.precision) in TRUE_HALF:
            raise GateError(
                f"--trainer.precision is {self.precision}, in which small steps of weights are lost and sums and labels are "
                "rounded; use bf16-mixed or 16-mixed, or --model.dtype bfloat16 to learn gates alone on fixed weights"
            )
        if self.precision is not None and str(self.precision) not in (*PRECISIONS, *OTHER_NAMES):
            raise GateError(f"--trainer.precision is {self.precision!r}; expected one of {', '.join(PRECISIONS)}")
        for name in ("limit_train_batches", "val_check_interval"):
            if getattr(self, name) == 0:
                raise GateError(
                    f"--trainer.{name} is {getattr(self, name)}; expected a count or a share above 0, or leave it out"
                )
