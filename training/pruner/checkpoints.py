"""Read training checkpoints, and check them before anything is written or trained."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch

from gates.errors import GateError
from training.pruner.module import HeadPruner


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a training checkpoint, tensors on the CPU; a pickle that holds more than data is not read.

    Raises:
        GateError: if it does not exist, is damaged, or is not a checkpoint of a training run.
    """
    path = str(path)
    if not Path(path).is_file():
        raise GateError(f"the checkpoint {path!r} does not exist; check the path")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, BadZipFile, OSError, ValueError) as error:
        raise GateError(f"the checkpoint {path!r} is corrupt and cannot be read; use an earlier one") from error
    if not (isinstance(content, dict) and {"state_dict", "loops"} <= content.keys()):
        raise GateError(f"{path!r} is not a checkpoint of a training run; expected one from a run's checkpoints folder")
    return content


def check_checkpoint(path: str, pruner: HeadPruner) -> None:
    """Whether a checkpoint exists, is whole, and belongs to this model.

    Raises:
        GateError: naming what is wrong.
    """
    content = read_checkpoint(path)
    weights, loops = content["state_dict"], content["loops"]
    groups = [group.get("name") for state in content.get("optimizer_states", []) for group in state["param_groups"]]
    if not loops or not groups:
        raise GateError(f"the checkpoint {path!r} holds weights only; resume from last.ckpt or dense.ckpt")
    if ("multipliers" in groups) != pruner.steering.has_multipliers:
        raise GateError(
            f"the checkpoint {path!r} was trained {'with' if 'multipliers' in groups else 'without'} multipliers; "
            "go on with the same --model.steering"
        )
    own = pruner.state_dict()
    extra = "gates._extra_state"
    if extra in weights:
        pruner.gates.set_extra_state(weights[extra] | {"mode": pruner.gates.mode})
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items() if torch.is_tensor(tensor)}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items() if torch.is_tensor(tensor)}
    if shapes != found:
        different = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise GateError(
            f"the checkpoint {path!r} is from another model: {len(different)} weights differ, the first is {different[0]!r} "
            f"({found.get(different[0], 'missing')} there, {shapes.get(different[0], 'missing')} here)"
        )
    mode = weights.get(extra, {}).get("mode")
    for name, asked in (("refit", pruner.options.refit), ("swaps", bool(pruner.options.swaps))):
        if mode == "masked" and asked and content.get({"swaps": "search"}.get(name, name)) is None:
            raise GateError(
                f"the mask in the checkpoint {path!r} is fixed already, so --model.{name} would come too late; go on from "
                "dense.ckpt, or leave it out"
            )
