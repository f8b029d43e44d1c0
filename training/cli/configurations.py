"""Which configuration a command line begins with."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from gates.errors import GateError
from training.config.yaml_text import read_yaml

CONFIGS = Path(__file__).parents[2] / "configs"
PACKAGED_CONFIGS = Path(__file__).parents[1] / "configs"
OF_TRANSLATION = ("--data.train_source", "--data.source_column")
OF_TEXT = ("--data.train_file", "--data.dataset", "--model.backbone")
OF_KINDS = {
    "Documents": "causal_lm.yaml",
    "SyntheticDocuments": "synthetic_causal_lm.yaml",
    "Ratings": "text.yaml",
    "Glue": "glue.yaml",
    "Tags": "token_classification.yaml",
    "Images": "image_classification.yaml",
}
"""Configurations of kinds of data that are named without one."""
OF_COMPARISONS = ("methods", "budgets", "seeds", "stages")
"""Options of the command compare alone that a configuration may hold."""
KIND_OF_FILES = {"--data.train_source": "ParallelText", "--data.train_file": "Text"}
"""Options that say which kind of data is meant, where neither the command line nor a configuration does."""


def with_config(given: Sequence[str]) -> list[str]:
    """A command line with what it leaves open: the configuration for what it names, and the kind of data.

    Configurations come first, so that an option counts more than they do wherever it stands. Without ``--config`` that is
    ``translation.yaml`` for parallel text, the one of :data:`OF_KINDS` for a kind of data that is named, ``text.yaml`` for a
    model or text of one's own, and otherwise the embedded ``default.yaml``.
    """
    names = [argument.split("=")[0] for argument in given]
    if "--config" not in names:
        return ["--config", str(default_config(names, kind_in(given))), *given]
    configs, others = split_off(given, "--config")
    configs = [part if part == "--config" else _shipped_part(part) for part in configs]
    implied = next((kind for option, kind in KIND_OF_FILES.items() if option in names), None)
    if implied is None or "--data" in names or "--data.class_path" in names or kinds_in(configs):
        return [*configs, *others]
    return [*configs, "--data", implied, *others]


def kind_in(given: Sequence[str]) -> str:
    """The kind of data that a command line names; empty if it names none."""
    named, _ = split_off(given, "--data")
    return named[-1].removeprefix("--data=") if named else ""


def default_config(names: Sequence[str] = (), kind: str = "") -> Path:
    """The configuration for these options and this kind of data, in a checkout or as packaged with an installed copy."""
    name = "default.yaml"
    if kind in OF_KINDS:
        name = OF_KINDS[kind]
    elif any(option in names for option in OF_TRANSLATION):
        name = "translation.yaml"
    elif any(option in names for option in OF_TEXT):
        name = "text.yaml"
    found = packaged(name)
    if found is None:
        raise GateError(f"the configuration {name} is not installed; give one with --config")
    return found


def packaged(name: str | Path) -> Path | None:
    """The file that comes with the product, in a checkout or an installed copy; None if there is none of this name."""
    return next((folder / name for folder in (CONFIGS, PACKAGED_CONFIGS) if (folder / name).is_file()), None)


def split_off(given: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """The arguments of an option with their values, as ``--option value`` or ``--option=value``, and the others."""
    return split_options(given, lambda name: name == option)


def split_options(given: Sequence[str], chosen: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """The arguments of some options with their values, as ``--option value`` or ``--option=value``, and the others.

    Args:
        given: arguments.
        chosen: function that says of an option's name whether it is one of them.
    """
    own: list[str] = []
    others: list[str] = []
    arguments = iter(given)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not chosen(name):
            others.append(argument)
            continue
        own += [argument, *([value] if not equals and (value := next(arguments, None)) is not None else [])]
    return own, others


def kinds_in(configs: Sequence[str]) -> list[str]:
    """The kinds of data that configurations name; what cannot be read the parser will complain of.

    Args:
        configs: as :func:`split_off` gives them.
    """
    found = []
    for _, content in _contents(configs):
        data = content.get("data")
        kind = data.get("class_path") if isinstance(data, dict) else data
        found += [kind] if isinstance(kind, str) else []
    return found


def check_is_no_comparison(configs: Sequence[str], known: Collection[str]) -> None:
    """Raises :class:`GateError` for a configuration that says what is compared, if the command compares nothing.

    Args:
        configs: as :func:`split_off` gives them.
        known: the options of the command.
    """
    for file, content in _contents(configs):
        for key in OF_COMPARISONS:
            if key in content and f"--{key}" not in known:
                raise GateError(f"the configuration {file!r} is of a comparison (it has {key}); give it to the command compare")


def _contents(configs: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files that can be read, with what they hold."""
    for file in (argument.removeprefix("--config=") for argument in configs if argument != "--config"):
        with suppress(GateError, yaml.YAMLError):
            content = read_yaml(file, "the configuration")
            if isinstance(content, dict):
                yield file, content


def shipped(path: str) -> str:
    """A file as it is named, or the one of this name that comes with the product, such as ``configs/text.yaml``."""
    path = os.path.expanduser(path)
    within = Path(path).relative_to("configs") if Path(path).parts[:1] == ("configs",) else Path(path)
    found = None if Path(path).exists() or within.is_absolute() else packaged(within)
    return path if found is None else str(found)


def _shipped_part(part: str) -> str:
    """The same for an argument, ``--config=PATH`` or the path alone."""
    option, equals, path = part.rpartition("=") if part.startswith("--config=") else ("", "", part)
    return f"{option}{equals}{shipped(path)}"
