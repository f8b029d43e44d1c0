"""What stands on a command line and in configurations, looked at as text before the parser makes values of it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser

from gates.errors import GateError
from training.config.checks import is_text
from training.config.data import KINDS
from training.config.paths import HubName, LocalPath
from training.config.yaml_text import check_yaml, read_text

ANOTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML takes for octal ones, such as 010, or for minutes and seconds, such as 1:30."""


def hints_of(parser: ArgumentParser) -> dict[str, Any]:
    """The type of every option, by its name without dashes; of data, those of all kinds."""
    hints = {action.dest: getattr(action, "_typehint", None) or action.type for action in parser._actions}
    for kind in KINDS.values():
        hints |= {f"data.{option}": hint for option, hint in get_type_hints(kind).items()}
    return {name: hint for name, hint in hints.items() if hint is not None}


def check_arguments(arguments: Sequence[str], parser: ArgumentParser) -> None:
    """Whether values and configurations on a command line can be read, within limits, and say what they seem to.

    Args:
        arguments: of the command line.
        parser: that will read them.

    Raises:
        GateError: for a configuration that cannot be read, text beyond the limits of :mod:`training.config.yaml_text` or that
            is not UTF-8, and numbers in other digits than 0 to 9 or to another base than they look.
    """
    hints = {name: hint for name, hint in hints_of(parser).items() if name != "data"}  # which stands for all of them
    for name, value in _named(arguments):
        if not is_text(value):
            raise GateError(f"{name or 'the command line'} has {value!r}, which is not UTF-8 text; write or rename it as UTF-8")
        if name == "--config" and os.path.exists(value):
            content = _as_written(read_text(value, "the configuration"), f"the configuration {value!r}")
        else:
            content = _as_written(value, name or repr(value[:60]))
        if name != "--config":
            content = {name.lstrip("-").removesuffix("+"): content}
        for option, number in _scalars(content, hints.keys()):
            check_number(option, number, hints[option])


def check_number(option: str, text: str, hint: Any) -> None:
    """Raises :class:`GateError` for a number that is written otherwise than one reads it, where an option takes numbers."""
    if takes_text(hint):
        return
    if not text.isascii() and _is_number(text):
        raise GateError(f"--{option} is {text!r}, whose digits are not those from 0 to 9; write it in these")
    if ANOTHER_BASE.fullmatch(text):
        raise GateError(f"--{option} is {text}, which YAML takes for another number; write it in decimal")


def takes_text(hint: Any) -> bool:
    """Whether a value of a type, or a part of it, may be any text."""
    parts = get_args(hint)[1:] if get_origin(hint) is dict else get_args(hint)
    return hint in (str, LocalPath, HubName) or any(takes_text(part) for part in parts)


def _named(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Values with the options before them; those of none have an empty name."""
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            if equals:
                yield name, value
                name = ""
        else:
            yield name, argument
            name = ""


def _as_written(text: str, named: str) -> Any:
    """The content of YAML with every value as a text; None for what is no YAML, of which the parser will complain."""
    with suppress(yaml.YAMLError):
        check_yaml(text, named)
        return yaml.load(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return None


def _scalars(content: Any, known: Collection[str], name: str = "") -> Iterator[tuple[str, str]]:
    """The single values in a configuration, with the options they are of."""
    if name in known:
        yield from ((name, text) for text in _leaves(content))
    elif isinstance(content, Mapping):
        for key, value in content.items():
            inner = f"{name}.{key}" if name else str(key)
            yield from _scalars(value, known, inner.replace("data.init_args.", "data."))


def _leaves(content: Any) -> Iterator[str]:
    if isinstance(content, Mapping):
        content = list(content.values())
    if isinstance(content, list):
        for one in content:
            yield from _leaves(one)
    elif isinstance(content, str):
        yield content


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
