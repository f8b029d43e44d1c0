"""A run as a whole: where it writes, which weights it keeps, what it is compared with at its end. Options without a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gates.errors import GateError
from training.config.checks import check_range, is_text
from training.config.paths import LocalPath

Existing = Literal["refuse", "resume", "overwrite"]
LARGEST_SEED = 2**32 - 1
"""That every library takes."""
LONGEST_NAME = 200
"""Bytes; a folder's name can have 255, and something is added to it."""


@dataclass(frozen=True)
class RunOptions:
    """Where a run writes, and what makes it this run.

    Args:
        run_dir: where to write (default: runs/NAME).
        existing: what to do if --run_dir holds a run.
        name: of the run; the default directory is runs/NAME.
        seed: of weights, data order, gates and dropout.
        ckpt_path: checkpoint to resume from, of this or another run.
        save_every: optimiser steps between checkpoints.
    """

    run_dir: LocalPath | None = None
    existing: Existing = "refuse"
    name: str = "run"
    seed: int = 0
    ckpt_path: LocalPath | None = None
    save_every: int = 200

    def __post_init__(self) -> None:
        check_range(self, "seed", least=0, most=LARGEST_SEED, prefix="--")
        check_range(self, "save_every", least=1, prefix="--")
        check_name(self.name)


def check_name(name: str, given: str = "--name") -> None:
    """Raises :class:`GateError` for a name that is no name of one folder, which stays where it is made.

    Args:
        name: of a run.
        given: what says it.
    """
    clean = is_text(name) and not any(ord(character) < 32 for character in name)
    if not clean or not name.strip() or name in (".", "..") or "/" in name or "\\" in name:
        raise GateError(f"{given} is {name!r}; expected the name of one folder, such as my-run; --run_dir takes a path")
    if len(name.encode()) > LONGEST_NAME:
        raise GateError(f"{given} has {len(name.encode())} bytes; expected at most {LONGEST_NAME}")


@dataclass(frozen=True)
class WeightsKept:
    """Which weights a phase ends with: the last, their average over some checkpoints, or the best.

    Args:
        average_last: checkpoints averaged at the end of fine-tuning and run.
        average_every: optimiser steps between them.
        patience: validations without improvement after which a dense-only run ends.
    """

    average_last: int = 1
    average_every: int = 100
    patience: int | None = None

    def __post_init__(self) -> None:
        check_range(self, "average_last", "average_every", "patience", least=1, prefix="--")
        if self.patience is not None and self.average_last > 1:
            raise GateError("--patience keeps the best weights and --average_last the average of the last; give one of them")


@dataclass(frozen=True)
class ScratchTraining:
    """How new weights are trained with a mask, as a control.

    Args:
        from_scratch_epochs: length of these trainings (default: the run's).
        from_scratch_learning_rate: at its peak (default: the run's).
    """

    from_scratch_epochs: float | None = None
    from_scratch_learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_range(self, "from_scratch_epochs", "from_scratch_learning_rate", above=0, prefix="--")


@dataclass(frozen=True)
class EndOfRun:
    """What a run compares its mask with, once it has trained.

    Args:
        compare: at the end of the run: nothing; every method's mask on the dense model; also trained on with each mask.
        retrained: with --compare full, methods to train on (default: all).
        from_scratch: with --compare full, methods whose mask is also trained from new weights, for as many steps as the whole
            run.
        curve: budgets of the post hoc curve, as fractions of all heads; with a budget per kind, of each pruned kind.
    """

    compare: Literal["none", "posthoc", "full"] = "full"
    retrained: list[str] | None = None
    from_scratch: list[str] = field(default_factory=list)
    curve: list[float] = field(default_factory=lambda: [0.75, 0.5, 0.25, 0.125])

    def __post_init__(self) -> None:
        for fraction in self.curve:
            if not 0 < fraction <= 1:
                raise GateError(f"--curve has the budget {fraction}; expected fractions of all heads above 0 and at most 1")


# The options of a latency table, in addition to those of its run.


@dataclass(frozen=True)
class LatencyOptions:
    """What is measured.

    Args:
        output: file to write, in JSON.
        batch_size: examples at a time (default: those of the first batch of the test split).
        length: tokens of each example (default: those of that batch).
    """

    output: LocalPath = field(default=LocalPath("latency.json"))
    batch_size: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        check_range(self, "batch_size", "length", least=1, prefix="--")


# How runs appear in W&B: the options ``--wandb.NAME``.


@dataclass(frozen=True)
class WandbOptions:
    """How the run appears in W&B.

    Args:
        mode: ``auto`` is online when logged in (or as WANDB_MODE says) and offline otherwise.
        project: W&B project.
        name: of the run; by default the run directory's.
        group: to put runs together.
        tags: free labels.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "head-gates"
    name: str | None = None
    group: str | None = None
    tags: list[str] | None = None


# Lightning's trainer: the options ``--trainer.NAME`` that a run leaves to its user.

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
        num_nodes: machines that take part, each with this number of devices.
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
        check_range(self, "num_nodes", "accumulate_grad_batches", "log_every_n_steps", least=1, prefix="--trainer.")
        check_range(self, "gradient_clip_val", least=0, prefix="--trainer.")
        check_range(self, "num_nodes", *["devices"] * isinstance(self.devices, int), most=MOST_DEVICES, prefix="--trainer.")
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
        check_range(self, "limit_train_batches", "val_check_interval", above=0, prefix="--trainer.")
