"""Read weights from untrusted sources without running code, and detect damage before a weight is used.

Only safetensors are read by default. A pickle needs an explicit flag and goes through ``torch.load(weights_only=True)``.
Checksums detect a flipped bit in the numbers, which safetensors does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors.torch import load_file
from torch import Tensor

from gates.errors import GateError, first_line
from gates.files import replacing

CHECKSUM_FILE = "checksums.json"
NOT_CHECKED = (CHECKSUM_FILE, "README.md")
"""Files without a checksum. A user may edit a model card."""
SAFE_NAMES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*(\.[A-Za-z0-9][A-Za-z0-9_]*)*")
LARGEST_NUMBER = 2**24
"""The exclusive limit of numbers in the shape of a model."""
HEAD_COUNT = re.compile(r"(^|_)(heads|n_head)(_per_layer)?$")


def read_weights(directory: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Tensor]:
    """Return all tensors of a saved model by name, on the CPU, without running code from its files.

    Args:
        directory: A directory with ``model.safetensors`` or ``pytorch_model.bin``, in one file or in shards with an index; or
            one weights file. Safetensors are preferred.
        allow_pickle: Whether ``.bin``, ``.pt``, ``.pth`` and ``.ckpt`` files may be read, with PyTorch's ``weights_only``
            unpickler.
    """
    path = Path(directory)
    if path.is_dir():
        path = _weights_file(path)
    if not path.is_file():
        raise GateError(f"{str(path)!r} does not exist; give a directory with {SAFE_NAMES[0]}, or a weights file")
    if path.name.endswith(".index.json"):
        return _read_shards(path, allow_pickle)
    return _read_file(path, allow_pickle)


def write_checksums(directory: str | os.PathLike[str]) -> None:
    """Write ``checksums.json`` with the SHA-256 of every file below ``directory``, except the model card and hidden files."""
    directory = Path(directory)
    sums = {}
    for path in sorted(directory.rglob("*")):
        relative = path.relative_to(directory)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if path.is_file() and not hidden and relative.as_posix() not in NOT_CHECKED:
            sums[relative.as_posix()] = _sha256(path)
    with replacing(directory / CHECKSUM_FILE) as partial:
        partial.write_text(json.dumps({"sha256": sums}, indent=2) + "\n", encoding="utf-8")


def holds_only_an_export(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory has the files that :func:`write_checksums` listed, and nothing that somebody added."""
    directory = Path(directory)
    if not (directory / CHECKSUM_FILE).is_file():
        return False
    verify_checksums(directory)
    listed = {*read_json(directory / CHECKSUM_FILE)["sha256"], *NOT_CHECKED}
    found = (path.relative_to(directory) for path in directory.rglob("*") if not path.is_dir())
    return all(path.as_posix() in listed or "__pycache__" in path.parts for path in found)


def verify_checksums(directory: str | os.PathLike[str]) -> None:
    """Compare every file that ``checksums.json`` lists with its SHA-256; a directory without that file passes."""
    directory = Path(directory)
    listing = directory / CHECKSUM_FILE
    if not os.path.lexists(listing):
        return
    if not listing.is_file():  # a pipe might never end
        raise GateError(f"{str(listing)!r} is not a regular file; copy the export again, or remove it")
    content = read_json(listing)
    sums = content.get("sha256") if isinstance(content, dict) else None
    if not isinstance(sums, dict) or not all(isinstance(value, str) for value in sums.values()):
        raise GateError(f"{str(listing)!r} is not a list of checksums; copy the export again, or remove that file")
    for name, expected in sums.items():
        path = _inside(directory, name, listing)
        if not path.is_file():
            raise GateError(f"{name!r} is in {CHECKSUM_FILE} but missing from {str(directory)!r}; copy the export again")
        if _sha256(path) != expected:
            raise GateError(
                f"{str(path)!r} differs from its SHA-256 in {CHECKSUM_FILE}; copy the export again, or remove {CHECKSUM_FILE} "
                "if you changed the file on purpose"
            )


def check_pruned_config(config: Any) -> None:
    """Raise an error unless ``config.pruned_attention`` is safe and can be the shape of a pruned model.

    It is untrusted data that names modules and attributes to set. So every name must be plain and public, every number
    possible, and nothing else may occur. The model itself checks whether the modules exist. A config must not request
    attention from a kernel on the Hub, which would be code. A config without ``pruned_attention`` passes.
    """
    _check_kernels(config)
    shapes = getattr(config, "pruned_attention", None)
    if shapes is None:
        return
    _expect(isinstance(shapes, Mapping), "pruned_attention", shapes, "attention modules by name")
    most = _most_heads(config)
    for name, shape in shapes.items():
        _check_name("pruned_attention", name)
        where = f"pruned_attention of {name!r}"
        _expect(isinstance(shape, Mapping), where, shape, "heads, kv_heads, projections and attributes")
        _check_plain(where, shape)
        heads, keys = shape.get("heads"), shape.get("kv_heads")
        for key, count in (("heads", heads), ("kv_heads", keys)):
            is_possible = _is_count(count) and count <= most
            _expect(is_possible, f"{key} in {where}", count, f"a whole number from 0 to {most}, the most in this config")
        _expect(not heads or (keys and heads % keys == 0), f"kv_heads in {where}", keys, f"a divisor of the {heads} heads")
        tables = {key: shape.get(key, {}) for key in ("projections", "attributes", "config", "modules")}
        for key, table in tables.items():
            _expect(isinstance(table, Mapping), f"{key} in {where}", table, "values by path")
        for path, sizes in tables["projections"].items():
            is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(map(_is_count, sizes))
            _expect(is_pair, f"{path!r} in {where}", sizes, "[features in, features out]")
        for path, value in (tables["attributes"] | tables["config"]).items():
            _expect(isinstance(value, int | float | None), f"{path!r} in {where}", value, "a number, true, false or null")
        for path, count in tables["modules"].items():
            _expect(_is_count(count) and count <= heads, f"{path!r} in {where}", count, f"at most one each of {heads} heads")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file."""
    path = Path(path)
    if not path.is_file():
        raise GateError(f"{str(path)!r} does not exist; give the directory of a saved model")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise GateError(f"{str(path)!r} is damaged or not JSON ({first_line(error)}); copy it again") from error


def _weights_file(directory: Path) -> Path:
    """Return the only weights file or index of a directory, first by Transformers' names."""
    for name in (*SAFE_NAMES, *PICKLE_NAMES):
        if (directory / name).is_file():
            return directory / name
    for suffixes in ((".safetensors",), PICKLE_SUFFIXES):
        found = sorted(path for path in directory.iterdir() if path.suffix in suffixes)
        if len(found) > 1:
            raise GateError(
                f"{str(directory)!r} has several weights files ({', '.join(path.name for path in found)}), but none is "
                f"{SAFE_NAMES[0]}; give one of them"
            )
        if found:
            return found[0]
    raise GateError(f"{str(directory)!r} has no weights; expected {SAFE_NAMES[0]} or {PICKLE_NAMES[0]}")


def _read_file(path: Path, allow_pickle: bool) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except Exception as error:  # safetensors raises many kinds
            raise GateError(
                f"{str(path)!r} is truncated, damaged or not a safetensors file ({first_line(error)}); copy it again"
            ) from error
    if path.suffix not in PICKLE_SUFFIXES:
        raise GateError(
            f"{str(path)!r} is not a weights file; expected .safetensors, or a pickle ({', '.join(PICKLE_SUFFIXES)})"
        )
    if not allow_pickle:
        raise GateError(
            f"{str(path)!r} is a pickle, which can run code; use a copy in safetensors, or, if you trust its source, "
            "allow_pickle=True (--allow_pickle)"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch's unpickler and zip reader raise many kinds
        raise GateError(
            f"{str(path)!r} is damaged, or a pickle of more than tensors ({first_line(error)}); use a copy in safetensors"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):  # a training checkpoint
        content = content["state_dict"]
    if not (
        isinstance(content, Mapping)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items())
    ):
        raise GateError(f"{str(path)!r} is not a state dict; expected tensors by name")
    return dict(content)


def _read_shards(index: Path, allow_pickle: bool) -> dict[str, Tensor]:
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise GateError(f"{str(index)!r} has no 'weight_map'; expected the index of sharded weights")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(map(str, places.values()))):
        shard = _inside(index.parent, name, index)
        if not shard.is_file():
            raise GateError(f"the shard {name!r} that {str(index)!r} lists is missing; copy it again")
        tensors |= _read_file(shard, allow_pickle)
    if missing := sorted(set(places) - set(tensors)):
        raise GateError(f"{str(index)!r} lists {missing[0]!r}, but its shards lack it; copy them again")
    return tensors


def _inside(directory: Path, name: str, listing: Path) -> Path:
    """Return the path of a listed file, which must be inside the directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts or not name:
        raise GateError(f"{str(listing)!r} lists {name!r}; expected the name of a file in its directory")
    return directory / name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_kernels(config: Any) -> None:
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for key in ("attn_implementation", "experts_implementation"):
            value = getattr(part, f"_{key}", None)
            if value is not None and not PLAIN_NAME.fullmatch(str(value)):
                raise GateError(f"config.json has {_short(value)} as {key}, which could load code; remove that entry")


def _check_plain(where: str, part: Any) -> None:
    """Raise an error unless nested data has only plain public names and numbers that are not negative."""
    pending = [part]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            for key in value:
                _check_name(where, key)
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, str):
            if value:  # the empty path is the module itself
                _check_name(where, value)
        else:
            is_possible = value is None or (isinstance(value, int | float) and 0 <= value < LARGEST_NUMBER)
            _expect(is_possible, f"a value in {where}", value, f"a number from 0 to {LARGEST_NUMBER}")


def _check_name(where: str, name: Any) -> None:
    is_plain = isinstance(name, str) and PLAIN_NAME.fullmatch(name)
    _expect(is_plain, f"a name in {where}", name, "letters, digits, underscores and single dots, and no underscore first")


def _expect(holds: Any, place: str, value: Any, expected: str) -> None:
    if not holds:
        raise GateError(f"{place} in config.json is {_short(value)}; expected {expected}")


def _most_heads(config: Any) -> int:
    """Return the largest head count in a config and its nested configs."""

    def counts(values: Mapping[Any, Any]) -> Iterator[int]:
        for key, value in values.items():
            if key == "pruned_attention":
                continue
            if isinstance(value, Mapping):
                yield from counts(value)
            elif HEAD_COUNT.search(str(key)):
                yield from filter(_is_count, value if isinstance(value, list | tuple) else [value])

    return max(counts(config.to_dict()), default=LARGEST_NUMBER)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
