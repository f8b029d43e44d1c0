"""A run as a whole: where it writes, which weights it keeps, what it is compared with at its end. Options without a prefix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gates.errors import GateError
from training.config.checks import above_0, at_least_1, is_text
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
        if not 0 <= self.seed <= LARGEST_SEED:
            raise GateError(f"--seed is {self.seed}; expected a whole number from 0 to {LARGEST_SEED}")
        at_least_1(self, "save_every", prefix="--")
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
        at_least_1(self, "average_last", "average_every", prefix="--")
        if self.patience is not None and self.patience < 1:
            raise GateError(f"--patience is {self.patience}; expected at least 1 validation")
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
        above_0(self, "from_scratch_epochs", "from_scratch_learning_rate", prefix="--")


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
