"""YAML of a user's, read within limits: a file of a kilobyte can stand for more values than any memory holds."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

from gates.errors import GateError

LONGEST = 1_000_000
"""Characters."""
MOST = 20_000
"""Values; those that an alias repeats count again each time."""
DEEPEST = 50
"""Lists and mappings within each other."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: str | Path, what: str) -> Any:
    """The content of a YAML file.

    Args:
        path: of the file.
        what: the file is called in an error, such as ``the configuration``.

    Raises:
        GateError: if there is no such file, it cannot be read, is not UTF-8, or goes beyond the limits.
        yaml.YAMLError: if it is no YAML.
    """
    return load_yaml(read_text(path, what), f"{what} {str(path)!r}")


def read_text(path: str | Path, what: str) -> str:
    """The text of a file that is short enough for a configuration; see :func:`read_yaml`."""
    named = f"{what} {str(path)!r}"
    try:
        regular = stat.S_ISREG(Path(path).stat().st_mode)
    except FileNotFoundError as error:
        raise GateError(f"{named} does not exist; check the path") from error
    except (OSError, ValueError) as error:  # a text that can be no path
        raise GateError(f"{named} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not regular:
        raise GateError(f"{named} is no regular file; write it to one, since it is read more than once")
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise GateError(f"{named} is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise GateError(f"{named} cannot be read: {error.strerror}") from error
    if len(text) > LONGEST:
        raise GateError(f"{named} has more than {LONGEST:,} characters; expected a short file of options")
    return text


def load_yaml(text: str, named: str) -> Any:
    """What a YAML text says.

    Args:
        text: YAML.
        named: what it is called in an error.

    Raises:
        GateError: if it goes beyond the limits.
        yaml.YAMLError: if it is no YAML.
    """
    check_yaml(text, named)
    return yaml.load(text, Loader=_Loader)


def check_yaml(text: str, named: str) -> None:
    """Raises :class:`GateError` for a text beyond the limits, before a value of it is made; see :func:`load_yaml`."""
    if len(text) > LONGEST:
        raise GateError(f"{named} has more than {LONGEST:,} characters; expected short YAML")
    count, sizes = 0, dict[str, int]()
    within: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in within):
                raise GateError(f"{named} has a value that contains itself (*{event.anchor}); write it out")
            count += sizes.get(str(event.anchor), 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = within.pop()
            sizes |= {anchor: count - before} if anchor else {}
        elif isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                within.append((event.anchor, count))
            elif event.anchor:
                sizes[event.anchor] = 1
            count += 1
        if len(within) > DEEPEST:
            raise GateError(f"{named} has lists or mappings more than {DEEPEST} deep within each other; expected a few levels")
        if count > MOST:
            raise GateError(f"{named} has more than {MOST:,} values, aliases written out; expected a short list of options")
    _check_keys(yaml.compose(text, Loader=_Loader), named)


def _check_keys(node: yaml.Node | None, named: str) -> None:
    """Raises :class:`GateError` for a mapping that has a key twice, of which YAML's readers take the last without a word."""
    waiting, seen = [node], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, yaml.CollectionNode) or id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, yaml.MappingNode):
            waiting += one.value
            continue
        keys = [key.value for key, _ in one.value if isinstance(key, yaml.ScalarNode)]
        if doubles := [key for index, key in enumerate(keys) if key in keys[:index]]:
            line = one.start_mark.line + 1
            raise GateError(f"{named} has {doubles[0]!r} twice within what begins at line {line}; leave one of them")
        waiting += [value for _, value in one.value]
