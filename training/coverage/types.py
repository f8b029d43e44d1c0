"""Every model type of the installed Transformers, with the classes that it can be built as."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from gates.errors import first_line
from training.coverage.architectures import randomise_
from training.coverage.shrink import tiny_config

LARGEST = 60_000_000
"""Parameters that a tiny model may have; more mean that some size was not made small."""


class NotBuiltError(Exception):
    """No tiny model of a type can be made here; the message says why."""


def model_types() -> list[str]:
    """The names of all model types, sorted."""
    mappings = [
        vars(modeling_auto)[name] for name in vars(modeling_auto) if name.endswith("_NAMES") and name.startswith("MODEL")
    ]
    return sorted({*CONFIG_MAPPING_NAMES, *(name for mapping in mappings for name in mapping)})


def tiny_models(model_type: str, *, seed: int = 0) -> Iterator[PreTrainedModel]:
    """Tiny random models of a type in evaluation mode, one for each class that can be built: the plain one first.

    Raises:
        NotBuiltError: if there is none.
    """
    try:
        config_class = CONFIG_MAPPING[model_type]
        config = config_class()
    except Exception as error:  # configurations refuse in many ways
        raise NotBuiltError(f"its configuration has no defaults: {first_line(error)}") from error
    classes = list(classes_of(model_type, config_class))
    if not classes:
        raise NotBuiltError("no class of models is made from its configuration")
    reasons: list[str] = []
    for model_class in classes:
        torch.manual_seed(seed)
        try:
            small = tiny_config(config)
            _check_size(model_class, small)
            model = model_class(small)
        except Exception as error:  # so do models
            reasons.append(f"{model_class.__name__}: {first_line(error)}")
            continue
        yield randomise_(model).eval()
    if len(reasons) == len(classes):
        raise NotBuiltError(reasons[0])


def classes_of(model_type: str, config_class: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """The classes of models of a type: what AutoModel makes, then those of other Auto classes, then those of a part."""
    seen: set[str] = set()
    for _, mapping in sorted(_mappings().items(), key=lambda item: item[0] != "MODEL_MAPPING_NAMES"):
        entry = mapping.get(model_type, ())
        for name in (entry,) if isinstance(entry, str) else entry:
            found = _class(config_class, name)
            if found is not None and name not in seen:
                seen.add(name)
                yield found
    if not seen:
        yield from _parts(config_class)


def _mappings() -> dict[str, Any]:
    """From model types to the names of their classes, for every Auto class, by the name of the mapping."""
    return {name: value for name, value in vars(modeling_auto).items() if name.endswith("_NAMES") and name.startswith("MODEL")}


def _class(config_class: type[PreTrainedConfig], name: str) -> type[PreTrainedModel] | None:
    try:
        transformers = importlib.import_module("transformers")
        found = getattr(transformers, name)
    except (ImportError, AttributeError, RuntimeError):
        return None
    return found if inspect.isclass(found) and issubclass(found, PreTrainedModel) else None


def _parts(config_class: type[PreTrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """Models that are part of another and that no Auto class loads: the shortest name first."""
    package, _, file = config_class.__module__.rpartition(".")
    try:
        module = importlib.import_module(f"{package}.{file.replace('configuration', 'modeling')}")
    except ImportError:
        return
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, PreTrainedModel)
        and member.__module__ == module.__name__
        and getattr(member, "config_class", None) is config_class
        and not member.__name__.endswith("PreTrainedModel")
    ]
    yield from sorted(found, key=lambda member: len(member.__name__))


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        try:
            model: nn.Module = model_class(config)
        except NotImplementedError:  # some count with their weights while they are made
            return
        except Exception:  # what is really wrong shows when it is built
            return
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > LARGEST:
        raise NotBuiltError(f"its tiny model would have {count:,} parameters")
