"""Read a user's YAML within limits, because a file of a kilobyte can stand for more values than any memory holds."""

from __future__ import annotations

import re
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
ANOTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+)")
"""Numbers that YAML takes for octal ones, such as 010, or for minutes and seconds, such as 1:30."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: str | Path, what: str) -> Any:
    """Return the content of a YAML file; a text that is no YAML raises :class:`yaml.YAMLError`.

    Args:
        what: The name of the file in an error, such as ``the configuration``.
    """
    return load_yaml(read_text(path, what), f"{what} {str(path)!r}")


def read_text(path: str | Path, what: str) -> str:
    """Return the text of a file, cut off beyond the limit of :func:`check_yaml`; see :func:`read_yaml`."""
    named = f"{what} {str(path)!r}"
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise GateError(f"{named} is no regular file; write it to one, since it is read more than once")
        with Path(path).open(encoding="utf-8") as file:
            return file.read(LONGEST + 1)
    except FileNotFoundError as error:
        raise GateError(f"{named} does not exist; check the path") from error
    except UnicodeDecodeError as error:
        raise GateError(f"{named} is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise GateError(f"{named} cannot be read: {error.strerror}") from error


def load_yaml(text: str, named: str) -> Any:
    """Return the content of a YAML text, whose name in an error is ``named``; see :func:`read_yaml`."""
    check_yaml(text, named)
    return yaml.load(text, Loader=_Loader)


def check_yaml(text: str, named: str) -> None:
    """Raise :class:`GateError` for a text beyond the limits, before a value of it is made; see :func:`load_yaml`."""
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
    _check_nodes(yaml.compose(text, Loader=_Loader), named)


def _check_nodes(root: yaml.Node | None, named: str) -> None:
    """Raise :class:`GateError` for a key that is there twice, and for a number that YAML reads to another base."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if doubles := [key for index, key in enumerate(keys) if key in keys[:index]]:
                line = node.start_mark.line + 1
                raise GateError(f"{named} has {doubles[0]!r} twice within what begins at line {line}; leave one of them")
            waiting += [value for _, value in node.value]
        elif isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and ANOTHER_BASE.fullmatch(node.value):
            raise GateError(f"{named} has {node.value}, which YAML takes for another number; write it in decimal, or in quotes")
