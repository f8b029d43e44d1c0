"""Which configuration a command line begins with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from gates.errors import GateError

CONFIGS = Path(__file__).parents[2] / "configs"
PACKAGED_CONFIGS = Path(__file__).parents[1] / "configs"
OF_TRANSLATION = ("--data.train_source", "--data.source_column")
OF_TEXT = ("--data.train_file", "--data.dataset", "--model.backbone")
KIND_OF_FILES = {"--data.train_source": "ParallelText", "--data.train_file": "Text"}
"""Options that say which kind of data is meant, where neither the command line nor a configuration does."""


def with_config(given: Sequence[str]) -> list[str]:
    """A command line with what it leaves open: the configuration for what it names, and the kind of data.

    Without ``--config`` that is ``translation.yaml`` for parallel text, ``text.yaml`` for a model or text of one's own, and
    otherwise the embedded ``default.yaml``.
    """
    names = [argument.split("=")[0] for argument in given]
    if "--config" not in names:
        return ["--config", str(default_config(names)), *given]
    if "--data" in names or "--data.class_path" in names or any(map(_names_data, _values(given, "--config"))):
        return list(given)
    implied = next((kind for option, kind in KIND_OF_FILES.items() if option in names), None)
    return [*given] if implied is None else _behind_configs(given, ["--data", implied])


def default_config(names: Sequence[str] = ()) -> Path:
    """The configuration for these options, in a checkout or as packaged with an installed copy."""
    name = "default.yaml"
    if any(option in names for option in OF_TRANSLATION):
        name = "translation.yaml"
    elif any(option in names for option in OF_TEXT):
        name = "text.yaml"
    for folder in (CONFIGS, PACKAGED_CONFIGS):
        if (folder / name).is_file():
            return folder / name
    raise GateError(f"the configuration {name} is not installed; give one with --config")


def _values(given: Sequence[str], option: str) -> list[str]:
    """All values of an option, as ``--option value`` or ``--option=value``."""
    following = [value for argument, value in pairwise(given) if argument == option]
    return following + [argument.split("=", 1)[1] for argument in given if argument.startswith(f"{option}=")]


def _names_data(config: str) -> bool:
    """Whether a configuration says of which kind the data are; what cannot be read the parser will complain of."""
    try:
        content: Any = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return True
    return isinstance(content, dict) and "data" in content


def _behind_configs(given: Sequence[str], more: Sequence[str]) -> list[str]:
    """Arguments put behind the last ``--config``, so that what follows still comes after them."""
    last = max(place for place, argument in enumerate(given) if argument.split("=")[0] == "--config")
    last += "=" not in given[last]
    return [*given[: last + 1], *more, *given[last + 1 :]]
