"""Training checkpoints: written whole or not at all, read only if no bit has changed, and checked before anything is trained.

A checkpoint is a ZIP archive, which has a checksum (CRC-32) of each of its parts. PyTorch writes these and never compares them.
It also has the identity of its run or experiment, so that another's is not taken for it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import CheckpointIO

from gates.errors import GateError, first_line
from gates.files import remove, replacing
from gates.gating.head_gates import read_extra_state
from training.pruner.module import HeadPruner

MEND = "use another, or remove it (a resumed run writes it again)"
IDENTITY = "identity"
"""The key of the identity of a run, see :func:`training.runs.resume.identity_of`, or of an experiment's key."""
KEPT = "kept"
"""The key of the name of the method whose heads a run keeps."""


class WholeCheckpoints(CheckpointIO):
    """Write and read checkpoints for Lightning.

    A checkpoint is staged next to its place, and is on the disk before it has its name. Reading compares the checksums.

    Args:
        identity: The identity of the run or experiment of these checkpoints; None for neither.
    """

    def __init__(self, identity: str | None = None) -> None:
        self.identity = identity

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        write_checkpoint(checkpoint | {IDENTITY: self.identity}, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return read_archive(path, mapped=False)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        remove(Path(path))


def write_checkpoint(content: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write content as ``torch.save`` does.

    Raises:
        OSError: With the name of the checkpoint, such as on a disk that is full; the file that was there before stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        try:
            with partial.open("wb") as file:
                torch.save(content, file)
        except (OSError, RuntimeError) as error:  # the second is what PyTorch makes of the first
            reason: BaseException | None = error
            while reason is not None and not isinstance(reason, OSError):
                reason = reason.__context__
            if reason is None:
                raise
            raise OSError(reason.errno, reason.strerror, str(path)) from error


def read_checkpoint(path: str | os.PathLike[str], *, mend: str = MEND) -> dict[str, Any]:
    """Return the content of a training checkpoint, tensors on the CPU; a pickle that holds more than data is not read.

    Args:
        mend: The advice for a damaged one.

    Raises:
        GateError: If it does not exist, is damaged, or is not a checkpoint of a training run.
    """
    content = read_archive(path, mend=mend)
    if not {"state_dict", "loops"} <= content.keys():
        raise GateError(f"{str(path)!r} is not a checkpoint of a training run; expected one from a run's checkpoints folder")
    return content


def read_archive(path: str | os.PathLike[str], *, mapped: bool = True, mend: str = MEND) -> dict[str, Any]:
    """Return the content that :func:`write_checkpoint` or ``torch.save`` has written, tensors on the CPU.

    Args:
        mapped: Whether tensors are read when they are first used, for callers that use few of them.
        mend: The advice for a damaged one.

    Raises:
        GateError: If it does not exist or is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise GateError(f"the checkpoint {str(path)!r} does not exist; check the path")
    check_whole(path, mend)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except PermissionError:
        raise  # no damage
    except Exception as error:  # an unpickler raises many kinds for damaged files
        raise GateError(f"the checkpoint {str(path)!r} is corrupt: cannot be read ({first_line(error)}); {mend}") from error
    if not isinstance(content, dict):
        raise GateError(f"{str(path)!r} is not a checkpoint of a training run; it holds a {type(content).__name__}")
    return content


def check_identity(content: Mapping[str, Any], path: str | os.PathLike[str], identity: str | None, of: str) -> None:
    """Check that a checkpoint is of the run or experiment where it lies.

    Args:
        of: The name of the run or experiment in an error.

    Raises:
        GateError: If it is another's.
    """
    if content.get(IDENTITY) != identity:
        raise GateError(
            f"the checkpoint {str(path)!r} is not of {of}: it was written with other options, data or first weights, or by "
            "another version; put back the one that belongs there, or remove it"
        )


def check_whole(path: Path, mend: str = MEND) -> None:
    """Compare a checkpoint with its checksums, once for a file that does not change.

    Raises:
        GateError: If it is damaged.
    """
    state = path.stat()
    _check_whole(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns), mend)


@lru_cache(maxsize=64)
def _check_whole(path: Path, state: tuple[int, ...], mend: str) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except PermissionError:  # says nothing about the content
        raise
    except Exception as error:  # zipfile's own, and those of names, lengths and methods that are none
        raise GateError(f"the checkpoint {str(path)!r} is corrupt: cannot be read ({first_line(error)}); {mend}") from error
    if damaged is not None:
        raise GateError(f"the checkpoint {str(path)!r} is corrupt: the checksum of {damaged!r} is wrong; {mend}")


def check_checkpoint(path: str, pruner: HeadPruner) -> None:
    """Check that a checkpoint exists, is whole, and belongs to this model.

    Raises:
        GateError: If it does not.
    """
    content = read_checkpoint(path)
    weights, loops = content["state_dict"], content["loops"]
    groups = [group.get("name") for state in content.get("optimizer_states", []) for group in state["param_groups"]]
    if not loops or not groups:
        raise GateError(f"the checkpoint {path!r} holds weights only; give a run's dense.ckpt")
    own = pruner.state_dict()
    extra = "gates._extra_state"
    saved = read_extra_state(weights[extra]) if extra in weights else {}
    if saved:
        pruner.gates.set_extra_state(saved | {"mode": pruner.gates.mode})
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items() if name != extra}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items() if name != extra}
    if shapes != found:
        different = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise GateError(
            f"the checkpoint {path!r} is from another model: {len(different)} weights differ, the first is {different[0]!r} "
            f"({found.get(different[0], 'missing')} there, {shapes.get(different[0], 'missing')} here)"
        )
