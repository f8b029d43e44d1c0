"""Options of a run as a whole: output, weights to keep, comparison at the end, latency, W&B and Lightning's trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gates.errors import GateError
from training.config.checks import check_range, is_text
from training.config.paths import LocalPath

Existing = Literal["refuse", "resume", "overwrite"]
LARGEST_SEED = 2**32 - 1
"""The largest seed that every library takes."""


@dataclass(frozen=True)
class RunOptions:
    """Output directory, name and seed of a run.

    Args:
        run_dir: The directory to write (default: runs/NAME).
        existing: The treatment of a run that --run_dir holds.
        name: The name of the run.
        seed: The seed of weights, data order, gates and dropout.
        ckpt_path: The checkpoint to resume from, of this or another run.
        save_every: The number of optimiser steps between checkpoints.
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
    """Raise :class:`GateError` for a name that cannot be the name of one folder."""
    clean = is_text(name) and not any(ord(character) < 32 for character in name)
    if not clean or not name.strip() or name in (".", "..") or "/" in name or "\\" in name:
        raise GateError(f"{given} is {name!r}; expected the name of one folder, such as my-run; --run_dir takes a path")
    if len(name.encode()) > 200:  # a folder's name can have 255, and suffixes are added to it
        raise GateError(f"{given} has {len(name.encode())} bytes; expected at most 200")


@dataclass(frozen=True)
class WeightsKept:
    """Weights at the end of a phase: the last, an average of checkpoints, or the best.

    Args:
        average_last: The number of checkpoints to average at the end of fine-tuning and of the run.
        average_every: The number of optimiser steps between averaged checkpoints.
        patience: The number of validations without improvement after which a dense-only run ends.
    """

    average_last: int = 1
    average_every: int = 100
    patience: int | None = None

    def __post_init__(self) -> None:
        check_range(self, "average_last", "average_every", "patience", least=1, prefix="--")
        if self.patience is not None and self.average_last > 1:
            raise GateError("--patience keeps the best weights, but --average_last an average; give one of them")


@dataclass(frozen=True)
class ScratchTraining:
    """Training of new weights with a mask, as a control.

    Args:
        from_scratch_epochs: The number of epochs of training from scratch (default: the run's).
        from_scratch_learning_rate: The peak learning rate of training from scratch (default: the run's).
    """

    from_scratch_epochs: float | None = None
    from_scratch_learning_rate: float | None = None

    def __post_init__(self) -> None:
        check_range(self, "from_scratch_epochs", "from_scratch_learning_rate", above=0, prefix="--")


Compared = Literal["none", "posthoc", "full"]
"""The comparisons at the end of a run, each with the rows of those before it."""


@dataclass(frozen=True)
class EndOfRun:
    """Comparison of a run's mask with other methods at its end.

    Args:
        compare: The methods in the table at the end. With none, these are the dense model and the run's choices. With posthoc,
            also the other methods without training, and a curve. With full, also retrained models.
        retrained: The methods to retrain with --compare full (default: all; text.yaml has three).
        from_scratch: The methods whose mask --compare full also trains from scratch, for as many steps as the whole run.
        curve: The budgets of the post hoc curve, as fractions of all heads, or of each pruned kind.
    """

    compare: Compared = "none"
    retrained: list[str] | None = None
    from_scratch: list[str] = field(default_factory=list)
    curve: list[float] = field(default_factory=lambda: [0.75, 0.5, 0.25, 0.125])

    def __post_init__(self) -> None:
        for fraction in self.curve:
            if not 0 < fraction <= 1:
                raise GateError(f"--curve has the budget {fraction}; expected fractions of all heads above 0 and at most 1")


@dataclass(frozen=True)
class LatencyOptions:
    """The measurement of a latency table.

    Args:
        output: The JSON file to write.
        batch_size: The number of examples per batch (default: that of the first test batch).
        length: The number of tokens per example (default: that of the first test batch).
    """

    output: LocalPath = field(default=LocalPath("latency.json"))
    batch_size: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        check_range(self, "batch_size", "length", least=1, prefix="--")


@dataclass(frozen=True)
class WandbOptions:
    """The run in W&B.

    Args:
        mode: The mode of W&B; ``auto`` follows WANDB_MODE, or is online when logged in and offline otherwise.
        project: The W&B project.
        name: The name of the run in W&B (default: that of the run directory).
        group: The group of the run in W&B.
        tags: The tags of the run in W&B.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "head-gates"
    name: str | None = None
    group: str | None = None
    tags: list[str] | None = None


PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "transformer-engine", "transformer-engine-float16")


@dataclass(frozen=True)
class TrainerOptions:
    """Settings of ``pytorch_lightning.Trainer``, under its names. The run decides on its other settings.

    The order of types matters: for numbers of batches, 1 is one batch and 1.0 all of them.

    Args:
        accelerator: The accelerator: ``cpu``, ``gpu``, or ``auto`` for a GPU if there is one. Apple's GPUs lack the float64
            that prices and scores need, so ``auto`` is ``cpu`` there.
        devices: The number of devices or a list of them, such as 2 or [0,3].
        precision: The precision, such as ``32-true``, ``bf16-mixed`` or ``16-mixed`` (default: 32-true).
        strategy: The strategy for several devices, such as ``ddp``.
        num_nodes: The number of machines, each with this number of devices.
        accumulate_grad_batches: The number of batches per optimiser step.
        gradient_clip_val: The largest norm of the model's gradient; null for no limit.
        gradient_clip_algorithm: The kind of clipping: ``norm`` (default) or ``value``.
        limit_train_batches: The training batches of an epoch: a count such as 10, or a share such as 0.5 (default: all).
        limit_val_batches: The batches of the selection split, as a count or a share (default: all).
        limit_test_batches: The batches of the test split, as a count or a share (default: all).
        val_check_interval: The batches, or the share of the run, between validations (default: once per epoch of the data).
        log_every_n_steps: The number of optimiser steps between two rows of metrics.csv and W&B.
        enable_progress_bar: Whether to show progress.
        deterministic: Whether to refuse nondeterministic operations (true) or to name them (``warn``).
        benchmark: Whether cuDNN searches for the fastest algorithms.
        plugins: The names of Lightning plugins.
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
        devices = ["devices"] * isinstance(self.devices, int)
        check_range(self, "num_nodes", *devices, most=4096, prefix="--trainer.")  # Lightning makes a list of them
        if self.accelerator == "mps":
            raise GateError("--trainer.accelerator is mps, which has no float64 for prices and scores; give cpu")
        if self.strategy.startswith(("fsdp", "deepspeed", "model_parallel")):
            raise GateError(
                f"--trainer.strategy is {self.strategy}, which shards a model; expected ddp; for sharding, write a training "
                "loop with gates.replicate_"
            )
        if str(self.precision) in ("bf16-true", "16-true"):
            raise GateError(
                f"--trainer.precision is {self.precision}, which rounds weight updates, labels and sums; use bf16-mixed or "
                "16-mixed, or --model.dtype bfloat16 to learn gates alone on frozen weights"
            )
        short = ("32", "64", "bf16", "16")  # other names of the first four
        if self.precision is not None and str(self.precision) not in (*PRECISIONS, *short):
            raise GateError(f"--trainer.precision is {self.precision!r}; expected one of {', '.join(PRECISIONS)}")
        check_range(self, "limit_train_batches", "val_check_interval", above=0, prefix="--trainer.")
