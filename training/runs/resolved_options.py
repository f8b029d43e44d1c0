"""The resolved options of runs and comparisons, as their ``config.yaml`` has them, one beside another."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gates.errors import GateError, first_line
from training.config.yaml_text import read_yaml


def read_options(file: Path, *, mend: str) -> dict[str, Any]:
    """The options in a configuration, by their names with dots.

    Args:
        file: the configuration.
        mend: what to do if it is damaged.

    Raises:
        GateError: if it cannot be read.
    """
    try:
        return flat_options(read_yaml(file, "the configuration"))
    except (GateError, yaml.YAMLError, AttributeError, RecursionError) as error:
        raise GateError(f"{str(file)!r} cannot be read ({first_line(error)}); {mend}") from error


def flat_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their names with dots."""
    return dict(_flat(content))


def is_among(option: str, names: Collection[str]) -> bool:
    """Whether an option is one of these names, or begins with one of them that ends in ``.`` or ``_``."""
    groups = tuple(name for name in names if name.endswith((".", "_")))
    return option in names or option.startswith(groups)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal and of one type: a budget of 1 is a head, one of 1.0 all heads."""
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value and prefix in ("", "data.", "trainer.", "wandb."):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
