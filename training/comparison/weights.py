"""The weights and gates that training left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gates.errors import GateError
from training.comparison.cache import Experiment
from training.pruner.checkpoints import check_whole, read_checkpoint
from training.pruner.module import HeadPruner

WEIGHTS = "weights.ckpt"


def read_weights(checkpoint: Path) -> dict[str, Any]:
    """The state dict of a checkpoint, on the CPU.

    Raises:
        GateError: if it is damaged.
    """
    content: dict[str, Any] = read_checkpoint(checkpoint, mend=mend_of(checkpoint))["state_dict"]
    return content


def checked(checkpoint: Path | None) -> Path | None:
    """The same checkpoint, if there is one, of which no bit has changed.

    Raises:
        GateError: if it is damaged.
    """
    if checkpoint is not None:
        check_whole(checkpoint, mend_of(checkpoint))
    return checkpoint


def mend_of(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint of an experiment, which can be made again."""
    return f"delete {str(checkpoint.parent)!r} and start again"


def backbone_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is the backbone's in the state dict of a module, by its names there."""
    return {name.removeprefix("backbone."): tensor for name, tensor in state.items() if name.startswith("backbone.")}


def weights_of(experiment: Experiment) -> Path:
    """The checkpoint that an experiment left.

    Raises:
        GateError: if it kept none, as the prune phase within a run of training.fit does not.
    """
    if not (experiment.path / WEIGHTS).is_file():
        raise GateError(
            f"{str(experiment.path)!r} holds no weights: a run does not keep those of the end of its prune phase; give the "
            "comparison another --experiments"
        )
    return experiment.path / WEIGHTS


def learned_result(pruner: HeadPruner) -> dict[str, Any]:
    """What gates have learned, as JSON: see :meth:`training.pruner.steering.Steering.learned`; and after which step each
    closed, ``[gates]``."""
    return pruner.steering.learned() | {"closing_step": pruner.closing_step.tolist()}
